"""lm-evaluation-harness runs its tasks offline on our models; its numbers are those of `apply`, and
of its own HFLM."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer import cli, models
from jaxformer.data import tokenizers
from jaxformer.errors import ConfigError
from jaxformer.evaluation import harness
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from tests.tiny import furnish

parity = pytest.mark.parity
pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn

MODEL = ModelConfig(vocab_size=256, num_layers=2, d_model=16, num_heads=2, context_length=32)
BYTES = tokenizers.Bytes()
TEXTS = [
    ("ab", "c"),
    ("the quick", " brown fox"),
    ("", "jumps over"),
    ("lazy ", "dog. " * 4),
    ("x" * 50, " and its end"),
    ("a", "b"),
]


def sharp(config, seed=1):
    """Parameters whose predictions are far from uniform."""
    params = models.init(config, jax.random.key(seed))
    return jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, params)


def requests(*rows):
    return [SimpleNamespace(args=row) for row in rows]


def by_hand(config, params, context, new):
    """(log-likelihood in float64, greedy or not) of tokens after others, from the logits of
    `apply`."""
    tokens = np.array([*context, *new])
    logits = np.asarray(
        models.apply(config, params, jax.device_put(tokens[None, :-1])).logits[0], np.float64
    )[-len(new) :]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs[np.arange(len(new)), new].sum(), bool((logits.argmax(axis=-1) == new).all())


@parity
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_log_likelihoods_are_those_of_apply(positions):
    config = MODEL if positions == "learned" else replace(MODEL, positions=Rope())
    params, newline = sharp(config), BYTES.encode("\n")
    lm = harness.model(config, params, BYTES, rows=4)
    window = 33  # the last token is predicted, but not read
    greedy = by_hand_greedy(config, params, BYTES.encode("ab"))
    pairs = [*TEXTS, ("ab", BYTES.decode([greedy]))] if greedy < 128 else TEXTS
    found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, new), (value, is_greedy) in zip(pairs, found, strict=True):
        stripped = context.rstrip()
        new = context[len(stripped) :] + new
        tokens = (BYTES.encode(stripped) or newline) + BYTES.encode(new)
        expected = by_hand(config, params, tokens[-window:][: -len(new)], BYTES.encode(new))
        assert value == pytest.approx(expected[0], rel=1e-5) and is_greedy == expected[1]
    with pytest.raises(ConfigError, match="40 tokens are to be scored in one piece"):
        lm.loglikelihood(requests(("a", "b" * 40)), disable_tqdm=True)


def by_hand_greedy(config, params, tokens):
    return int(
        models.apply(config, params, jax.device_put(np.array([tokens]))).logits[0, -1].argmax()
    )


@parity
def test_rolling_scores_each_token_once_with_all_the_context_there_is():
    params = sharp(MODEL)
    lm = harness.model(MODEL, params, BYTES, rows=4)
    texts = ["short", "", "long " * 20, "x" * 31]
    for text, value in zip(
        texts, lm.loglikelihood_rolling(requests(*((text,) for text in texts))), strict=True
    ):
        tokens, expected = BYTES.encode("\n" + text), 0.0
        for first in range(1, len(tokens), 32):
            last = min(first + 32, len(tokens))
            expected += by_hand(
                MODEL, params, tokens[max(last - 33, 0) : first], tokens[first:last]
            )[0]
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-9)


@parity
def test_few_programs_serve_many_lengths():
    from jaxformer.decoding.search import _score

    lm = harness.model(MODEL, sharp(MODEL), BYTES, rows=4)
    before = _score._cache_size()
    lm.loglikelihood(
        requests(*(("a" * n, "b" * m) for n in range(1, 20) for m in range(1, 9))),
        disable_tqdm=True,
    )
    assert _score._cache_size() - before <= 2  # 16 and 32 tokens


@parity
def test_generation_obeys_the_task():
    params = sharp(MODEL)
    lm = harness.model(MODEL, params, BYTES, rows=2)
    free, *_ = lm.generate_until(requests(("the quick", {"until": [], "max_gen_toks": 8})))
    prompt = BYTES.encode("the quick")
    for _ in range(8):
        prompt.append(by_hand_greedy(MODEL, params, prompt))
    assert BYTES.decode(prompt) == "the quick" + free
    stop = free[3:5]
    kinds = [
        ("the quick", {"until": stop, "max_gen_toks": 8}),
        ("brown", {"until": ["\n"], "max_gen_toks": 4}),
        ("the quick", {"until": [stop], "max_gen_toks": 8, "do_sample": False}),
        ("", {"max_gen_toks": 31, "do_sample": True, "temperature": 0.7, "top_p": 0.9}),
    ]
    texts = lm.generate_until(requests(*kinds))
    assert texts[0] == texts[2] == free[: free.index(stop)] and len(texts[1]) <= 4 and texts[3]
    for arguments, said in (
        ({"num_beams": 3}, "num_beams is not known"),
        ({}, "max_gen_toks=256 leaves no room"),
    ):
        with pytest.raises(ConfigError, match=said):
            lm.generate_until(requests(("the quick", arguments)))


CHOICE = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/animals.jsonl"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ANSWER = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/animals.jsonl"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 5, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """
task: text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/animals.jsonl"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - {{metric: bits_per_byte}}
"""
EXAMPLES = [
    {"question": "the quick brown", "choices": [" fox", " dog", " cat"], "label": 0},
    {"question": "over the lazy", "choices": [" fox", " dog"], "label": 1},
    {"question": "jumps", "choices": [" under", " over", " at"], "label": 1},
]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A trained tiny run as the current folder, and a folder of tasks."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(furnish(tmp_path))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "animals.jsonl").write_text(
        "".join(json.dumps(example) + "\n" for example in EXAMPLES)
    )
    for name, text in (("animals", CHOICE), ("endings", ANSWER), ("text", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    assert cli.main(["train", "tiny"]) == 0
    return folder


@parity
def test_the_command_runs_local_tasks_of_all_three_kinds_offline(tasks, capsys):
    import jaxformer

    capsys.readouterr()
    assert cli.main(["harness", "tiny", "--tasks=animals,endings,text", f"--include={tasks}"]) == 0
    out = capsys.readouterr().out
    assert "acc_norm" in out and "exact_match" in out and "harness.json" in out
    (folder,) = (tasks.parent / "runs").glob("tiny-*")
    written = json.loads((folder / "harness.json").read_text())
    run = jaxformer.open_run(folder)
    model, params = run.experiment.model, run.params  # of 16 positions
    score = lambda text, new: by_hand(
        model, params, BYTES.encode(text + new)[-16 : -len(new)], BYTES.encode(new)
    )[0]
    right, nats = 0, 0.0
    for example in EXAMPLES:
        question = example["question"]
        right += (
            int(np.argmax([score(question, choice) for choice in example["choices"]]))
            == example["label"]
        )
        nats -= score("\n", question)
    assert written["step"] == 6 and written["results"]["animals"]["acc,none"] == pytest.approx(
        right / len(EXAMPLES)
    )
    bits = nats / math.log(2) / sum(len(example["question"]) for example in EXAMPLES)
    assert written["results"]["text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert cli.main(["harness", "tiny", "--tasks=animals", f"--include={tasks}", "--limit=1"]) == 0
    assert (
        json.loads((folder / "harness.json").read_text())["n-samples"]["animals"]["effective"] == 1
    )
    assert cli.main(["harness", "tiny", "--tasks=animal", f"--include={tasks}"]) == 2
    assert "did you mean animals" in capsys.readouterr().err
    (tasks / "animals.jsonl").unlink()
    assert cli.main(["harness", "tiny", "--tasks=animals", f"--include={tasks}"]) == 2
    assert "out of reach" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """(HFLM, our LM, the words of both) of a random GPT-2 that transformers saved."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    from jaxformer import families

    folder = tmp_path_factory.mktemp("gpt2")
    words = tokenizers.BPE.train(" ".join(f"{context} {new}" for context, new in TEXTS) * 3, 300)
    (folder / "words.json").write_text(json.dumps(words.state["tokenizer"]))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words.json"),
        eos_token=tokenizers.END_OF_TEXT,
        pad_token=tokenizers.END_OF_TEXT,
    )
    end = theirs.eos_token_id
    config = transformers.GPT2Config(
        vocab_size=words.vocab_size,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_positions=48,
        bos_token_id=end,
        eos_token_id=end,
        initializer_range=0.4,
    )
    theirs_model = transformers.GPT2LMHeadModel(config).eval()
    theirs_model.save_pretrained(folder / "model")
    ours = families.load(folder / "model")
    lm = harness.model(
        ours.config, ours.params, words, end=ours.tokens.eos, prefix=ours.tokens.bos, rows=4
    )
    return HFLM(theirs_model, tokenizer=theirs, batch_size=3, device="cpu"), lm, words


@parity
def test_numbers_are_those_of_hflm_on_the_same_weights(gpt2):
    theirs, ours, _ = gpt2
    texts = [
        ("the quick", " brown fox"),
        ("", "jumps over"),
        ("lazy ", "dog. " * 4),
        ("dog " * 60, "jumps over"),
    ]
    expected = theirs.loglikelihood(requests(*texts), disable_tqdm=True)
    for (value, greedy), (their_value, their_greedy) in zip(
        ours.loglikelihood(requests(*texts)), expected, strict=True
    ):
        assert value == pytest.approx(their_value, rel=1e-4, abs=1e-4) and greedy == their_greedy
    texts = [("the quick brown fox",), ("lazy dog. " * 30,)]
    expected = theirs.loglikelihood_rolling(requests(*texts), disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests(*texts)) == pytest.approx(expected, rel=1e-4)


@parity
def test_texts_are_those_of_hflm_on_the_same_weights(gpt2):
    theirs, ours, _ = gpt2
    for until in ([], ["o"], ["x", "he"]):
        rows = [(context or "a", {"until": until, "max_gen_toks": 12}) for context, _ in TEXTS]
        expected = theirs.generate_until(requests(*rows), disable_tqdm=True)
        assert ours.generate_until(requests(*rows)) == expected


@pytest.mark.thorough
def test_what_cannot_be_asked_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no language model"):
        harness.model(replace(MODEL, heads=()), {}, BYTES)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match="pip install 'jaxformer\\[harness\\]'"):
        harness.model(MODEL, sharp(MODEL), BYTES)
