"""Answers of the policy as data: which tokens, which rewards, what is refused, and a run."""

import json
import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.data import batching, chat, tokenizers
from jaxformer.data.chat_template import built_in
from jaxformer.data.rollouts import Answer, Rollouts, is_right
from jaxformer.data.sources import Dataset, Question
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.objectives import PolicyGradient
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh
from jaxformer.runs import loop
from jaxformer.training import AdamW, Checkpoints, Experiment

MODEL = ModelConfig(
    vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=72, positions=Rope(),
    dropout_rate=0.3,
)  # fmt: skip
WORDS = {"one": "1", "two": "22", "six": "6"}
B, G = 2, 4


@dataclass(frozen=True)
class Numbers:
    """Conversations of a word and its number."""

    def open(self, model):
        talks = [
            chat.Conversation(
                word,
                [{"role": "user", "content": word}, {"role": "assistant", "content": number}],
            )
            for word, number in WORDS.items()
        ]
        tokenizer = tokenizers.Bytes().with_chat(built_in("chatml"))
        return chat.open_chat(talks, talks[:2], tokenizer, model)

    def question(self, model, tokenizer, text, reference=""):
        return chat.question(tokenizer, [{"role": "user", "content": text}], reference)


def digits(answers):
    """The share of a text that is digits."""
    return [sum(map(str.isdigit, answer.text)) / max(len(answer.text), 1) for answer in answers]


@pytest.fixture(scope="module")
def tree():
    return P.init(models.spec(MODEL), jax.random.key(0))


def drawn(rollouts, tree, seed=0, step=0):
    return rollouts.open(MODEL).train(tree, jax.random.key(seed), step, B)


@pytest.mark.thorough
def test_a_batch_holds_prompts_with_their_answers(tree):
    """Each row is a prompt, then tokens until one that ends an answer, or `max_tokens`."""
    seen = []

    def reward(answers):
        seen.extend(answers)
        return [float(i) for i in range(len(answers))]

    rollouts = Rollouts(Numbers(), reward, group=G, max_tokens=24, temperature=1.5)
    batch = drawn(rollouts, tree)
    assert len(seen) == B * G and batch["rewards"].ravel().tolist() == list(range(B * G))
    ends = tokenizers.stop_tokens(tokenizers.Bytes().with_chat(built_in("chatml")))
    tokenizer = Numbers().open(MODEL).tokenizer
    for row, answer in enumerate(seen):
        tokens, labels, flags = (
            batch[name][row // G, row % G] for name in ("tokens", "labels", "answers")
        )
        prompt = answer.question.prompt
        text = [*tokens[: len(prompt)].tolist(), *labels[flags > 0].tolist()]
        assert text == [*prompt, *answer.tokens]
        assert np.flatnonzero(flags)[0] == len(prompt) - 1 and flags.sum() == len(answer.tokens)
        n = len(text) - 1
        assert tokens[:n].tolist() == text[:-1] and labels[:n].tolist() == text[1:]
        assert not tokens[n:].any() and not labels[n:].any()
        assert all(token not in ends for token in answer.tokens[:-1])
        assert answer.is_complete == (answer.tokens[-1] in ends)
        assert answer.is_complete or len(answer.tokens) == 24
        told = answer.tokens[:-1] if answer.is_complete else answer.tokens
        assert answer.text == tokenizer.decode(told)
    # the answers to one question stand together, and the questions are the data's own
    for b in range(B):
        asked = {tuple(answer.question.prompt) for answer in seen[b * G : (b + 1) * G]}
        assert len(asked) == 1
    assert {answer.question.reference for answer in seen} <= set(WORDS.values())
    assert batch["temperature"].tolist() == [1.5] * B and batch["weights"].tolist() == [1] * B


@pytest.mark.thorough
def test_a_batch_is_a_function_of_parameters_key_and_step(tree):
    rollouts = Rollouts(Numbers(), digits, group=G, max_tokens=8)
    first, again = drawn(rollouts, tree), drawn(rollouts, tree)
    other = drawn(rollouts, tree, seed=1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["labels"], other["labels"])


@pytest.mark.thorough
def test_several_steps_of_one_batch_of_samples(tree):
    """The other steps have the same shapes, no weight, and write nothing."""
    rollouts = Rollouts(Numbers(), digits, group=G, max_tokens=8, updates=3)
    batches = [drawn(rollouts, tree, step=step) for step in range(4)]
    assert [batch["fresh"].tolist() for batch in batches] == [[1] * B, [0] * B, [0] * B, [1] * B]
    shapes = [{name: (leaf.shape, leaf.dtype) for name, leaf in b.items()} for b in batches]
    assert all(each == shapes[0] for each in shapes)
    assert not any(leaf.any() for name, leaf in batches[1].items() if name != "temperature")


def test_the_answers_of_the_data_are_right():
    question = Question([1], " 42")
    answers = [
        Answer(question, [4, 2, 0], "42", True),
        Answer(question, [4, 2], "42", False),
        Answer(question, [4, 0], "4", True),
    ]
    assert is_right(answers) == [1.0, 0.0, 0.0]


@pytest.mark.thorough
def test_a_tiny_run_learns_and_is_resumed_to_the_same_bits(tmp_path, capsys):
    """Reward is the share of digits: it grows, and the run is resumed to the same bits."""
    experiment = Experiment(
        name="digits",
        model=replace(MODEL, dropout_rate=0.0),
        data=Rollouts(Numbers(), digits, group=8, max_tokens=6, updates=2),
        objective=PolicyGradient(sample_shape=(8, 8, 32)),
        optimizer=AdamW(1e-2, weight_decay=0.0),
        steps=24,
        batch_size=8,
        log_every=1,
        eval_every=24,
        checkpoints=Checkpoints(every=3, keep_latest=40),
    )
    whole = loop.train(experiment, tmp_path)
    lines = (whole.folder / "metrics.jsonl").read_text()
    rewards = [json.loads(line)["reward"] for line in lines.splitlines() if '"reward"' in line]
    assert np.mean(rewards[-4:]) > 1.5 * np.mean(rewards[:4])
    assert rewards[0] == rewards[1]  # two steps of one batch of samples
    # step 9 is the second of its batch of samples: the checkpoint after step 8 has these
    saved = {int(path.name) for path in (whole.folder / "checkpoints").iterdir()}
    assert 9 in saved and rewards[8] == rewards[9] != rewards[7]
    for step in saved:
        if step > 9:
            shutil.rmtree(whole.folder / "checkpoints" / str(step))
    capsys.readouterr()
    resumed = loop.train(experiment, tmp_path)
    assert "resuming after step 9" in capsys.readouterr().out
    assert (resumed.folder / "metrics.jsonl").read_text() == lines
    assert whole.validation == resumed.validation


@pytest.mark.thorough
def test_eight_devices_draw_and_train_alike(tmp_path):
    """The first steps, before rounding differs: one device, and eight."""
    found = []
    for mesh in (Mesh(data=1), Mesh(data=2, fsdp=4)):
        experiment = Experiment(
            name="digits",
            model=replace(MODEL, dropout_rate=0.0),
            data=Rollouts(Numbers(), digits, group=4, max_tokens=6),
            objective=PolicyGradient(),
            steps=3,
            batch_size=8,
            log_every=1,
            eval_every=3,
            mesh=mesh,
        )
        folder = loop.train(experiment, tmp_path / str(mesh.fsdp)).folder
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines if "reward" in line])
    one, eight = found
    for name in ("reward", "loss", "entropy", "answer_length"):
        np.testing.assert_allclose(
            [line[name] for line in one], [line[name] for line in eight], rtol=1e-4, atol=1e-5
        )


@dataclass(frozen=True)
class Without:
    """Data without questions."""

    def open(self, model):
        rows = [{"tokens": np.zeros(4, np.int32), "weights": np.ones(4, np.float32)}]
        return Dataset(rows, rows, digest="none")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rollouts(Numbers(), group=1), r"data\.group=1: expected a whole number"),
        (lambda: Rollouts(Numbers(), updates=0), r"data\.updates=0"),
        (
            lambda: Rollouts(Numbers(), temperature=0.0),
            r"data\.temperature=0\.0: expected a finite",
        ),
        (lambda: Rollouts(Without()).open(MODEL), r"data\.questions=Without: .* no questions"),
        (
            lambda: Rollouts(Numbers(), max_tokens=60).open(MODEL),
            r"data\.max_tokens=60: no question leaves so many of the model's 72 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda answers: [1.0], r"gave shape \(1,\); expected a finite number for each of 8"),
        (lambda answers: [float("nan")] * 8, r"gave nan for one answer"),
        (lambda answers: ["good"] * 8, r"gave list; expected a number for each of 8 answers"),
        (lambda answers: None, r"expected a (finite )?number for each of 8 answers"),
    ],
)
def test_a_reward_of_another_form_is_refused(reward, said, tree):
    with pytest.raises(ConfigError, match=said):
        drawn(Rollouts(Numbers(), reward, group=G, max_tokens=2), tree)


def test_a_split_may_ask_for_the_batch_size():
    """Only a function that names the parameter gets it."""
    seen = []

    def split(params, key, step, batch_size):
        seen.append(batch_size)
        return {"x": np.zeros(batch_size)}

    data = SimpleNamespace(open=lambda model: Dataset(split, [], digest=""))
    batching.check_splits(data.open(None))
    assert batching.batch_of_state(split, None, None, 0, 5)["x"].shape == (5,)
    assert seen == [5]
    with pytest.raises(ConfigError, match=r"is called as \(params, key, step\)"):
        batching.check_splits(Dataset(lambda params, key, step, size: {}, [], digest=""))


def test_questions_of_a_users_text_are_those_of_the_data():
    rollouts = Rollouts(Numbers())
    tokenizer = Numbers().open(MODEL).tokenizer
    asked = rollouts.question(MODEL, tokenizer, "one")
    assert asked == Numbers().question(MODEL, tokenizer, "one")
    assert not hasattr(Rollouts(Without()), "question")
