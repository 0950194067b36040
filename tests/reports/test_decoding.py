"""Generation, sampling, filters, streaming and stop tokens: what users of other projects
reported."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer import masks, models, zoo
from jaxformer.cli.runs import _generate_file, unescaped
from jaxformer.data.corpus import Corpus
from jaxformer.data.mixing import Mixed
from jaxformer.data.sources import Question
from jaxformer.data.tokenizers import BPE
from jaxformer.decoding import (
    Beams,
    Draft,
    Lookup,
    Sampling,
    contrast,
    generate,
    score,
    search,
    speculate,
)
from jaxformer.decoding.arguments import as_filters, as_key
from jaxformer.decoding.filters import (
    BadWords,
    ForcedPrefix,
    Frequency,
    History,
    LogitBias,
    MinP,
    NoRepeatNgram,
    TopK,
    TopP,
    Typical,
)  # fmt: skip
from jaxformer.decoding.sampling import draw
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import (
    Generated,
    answers,
    as_strings,
    before_stop,
    continuation,
)
from jaxformer.evaluation.metric import Evaluation
from jaxformer.models import Alibi, AttentionPositions, Mixture, ModelConfig, Relative, Sinusoidal
from jaxformer.ops.positions import Rope
from jaxformer.runs import questions, run as runs
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training.experiment import Experiment, Sample

V = 7
TINY = ModelConfig(
    vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=32, init_std=0.5
)
GREEDY = Sampling(temperature=0.0)


@cache
def params():
    return models.init(TINY, jax.random.key(0))


def kept(some_filter, probabilities):
    """The tokens that a filter leaves."""
    logits = jnp.log(jnp.asarray([probabilities], jnp.float32))
    return np.flatnonzero(np.isfinite(np.asarray(some_filter(logits, None)))[0]).tolist()


# --- nothing is left to choose


@pytest.mark.report(
    "OpenNMT/OpenNMT-py#1445", "allenai/allennlp#2557", "huggingface/transformers#21435",
    right="where filters leave no token, the text ends", listed="second 01",
    hit="greedy repeated what the filter forbids, sampling wrote token 0, beams lost the text",
)  # fmt: skip
@pytest.mark.thorough
def test_a_text_ends_where_filters_leave_no_token():
    """The texts are permutations of the tokens that the prompt does not have; then nothing may
    follow."""
    once, prompt = [NoRepeatNgram(1)], [0, 1, 0]
    (greedy,) = generate(TINY, params(), [prompt], 12, sampling=GREEDY, filters=once)
    beams = [
        text.tokens
        for text in search(TINY, params(), [prompt], 12, beams=Beams(3, 3), filters=once)[0]
    ]
    assert len(beams) == 3
    for text in (greedy, *beams):
        assert sorted(text) == [2, 3, 4, 5, 6]
    nothing = [BadWords([[token] for token in range(V)])]
    assert generate(TINY, params(), [prompt], 12, filters=nothing) == [[]]


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#47511",
    right=(
        "contrastive and speculative decoding, too, end a text where every token is banned, and "
        "its neighbours go on"
    ),
)
@pytest.mark.parametrize("way", ["contrast", "lookup", "draft"])
def test_other_ways_of_decoding_end_where_every_token_is_banned(way):
    """Once each: the first text has used all tokens but 3, 4 and the second none but 1. None is
    left to a text of all seven."""
    prompts, filters = [[0, 1, 2, 5, 6], [1], [0, 1, 2, 3, 4, 5, 6]], [NoRepeatNgram(1)]
    expected = generate(TINY, params(), prompts, 9, sampling=GREEDY, filters=filters)
    assert [len(tokens) for tokens in expected] == [2, 6, 0]
    if way == "contrast":
        found = contrast(TINY, params(), prompts, 9, k=3, alpha=0.0, filters=filters)
    else:
        draft = Lookup() if way == "lookup" else Draft(TINY, params())
        found = speculate(
            TINY, params(), prompts, 9, draft=draft, sampling=GREEDY, filters=filters
        ).tokens
    assert found == expected


@pytest.mark.thorough
@pytest.mark.report(
    "JustVugg/colibri#369",
    "OpenRLHF/OpenRLHF#1165",
    right="logits that are not numbers are an error, not a text",
    hit=(
        "a model of NaN wrote the last token of the vocabulary for ever, beams found no text, "
        "both in silence"
    ),
)
def test_a_model_whose_logits_are_not_numbers_writes_no_text():
    broken = jax.tree.map(lambda x: x * jnp.nan, params())
    with pytest.raises(ConfigError, match="NaN"):
        generate(TINY, broken, [[1, 2]], 4, sampling=GREEDY)
    with pytest.raises(ConfigError, match="NaN"):
        search(TINY, broken, [[1, 2]], 4)


@pytest.mark.thorough
@pytest.mark.report(
    "abisee/pointer-generator#6",
    right="an empty list of texts gives an empty answer, no crash",
    listed="second 45",
    hit="IndexError at the end of training",
)
def test_a_list_of_texts_may_be_empty(monkeypatch):
    tokenizer = SimpleNamespace(end_of_text=V - 1, decode=lambda tokens: "".join(map(str, tokens)))
    dataset = SimpleNamespace(
        validation=SimpleNamespace(questions=[Question([1, 2], "x")]), tokenizer=tokenizer
    )
    scored = Evaluation(TINY, params(), dataset, lambda: iter(()), "float32", 0)
    as_it_is = lambda answers, references: {"answer": answers[0]}
    how = Beams(2, length_penalty=-60.0)  # the scores of long texts are beyond float32
    long = Generated((as_it_is,), how=how, max_tokens=20)(scored)
    assert len(long["answer"]) == 20
    monkeypatch.setattr("jaxformer.evaluation.generation.search", lambda *_, **options: [[]])
    assert Generated((as_it_is,), how=how)(scored) == {"answer": ""}
    monkeypatch.setattr(questions, "ask", lambda *_: Question([1, 2], ""))
    experiment = Experiment(
        name="x", model=TINY, data=Corpus("nowhere"), sample=Sample("1", sampling=how)
    )
    assert questions.sample_text(experiment, params(), dataset) == "1"


# --- filters


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#18976", "BlinkDL/ChatRWKV#170",
    right="top-p leaves as few tokens as reach p, also where they reach it exactly",
    hit="of five equal tokens and p = 0.6 four were left: 1 - p and the sums round in float32",
)  # fmt: skip
def test_top_p_adds_no_token_where_p_is_reached_exactly():
    cases = [
        (0.8, [0.3, 0.1, 0.1, 0.5], [0, 3]),
        (0.6, [0.2] * 5, [0, 1, 2]),
        (0.3, [0.1] * 10, [0, 1, 2]),
        (0.7, [0.4, 0.3, 0.2, 0.1], [0, 1]),
        (0.95, [0.9, 0.05, 0.05], [0, 1]),
        (0.9, [0.5, 0.2, 0.2, 0.1], [0, 1, 2]),
    ]
    for p, probabilities, expected in cases:
        assert kept(TopP(p), probabilities) == expected, (p, probabilities)
    assert kept(TopP(1.0), [1.0, 1e-9, 1e-30]) == [0, 1, 2]
    assert kept(Typical(1.0), [1.0, 1e-9, 1e-30]) == [0, 1, 2]


@pytest.mark.report(
    "rasbt/reasoning-from-scratch#164",
    listed="second 40",
    right="top-p leaves the likeliest tokens up to the one that reaches p, the first of equals",
)
def test_top_p_counts_like_whole_numbers():
    """The probabilities are parts of a whole number, and p lies half a part below the m-th part."""
    rng = np.random.default_rng(0)
    parts = rng.integers(0, 4, (200, 8))
    parts[:, 0] += 1
    total = parts.sum(axis=1)
    wanted = rng.integers(1, total + 1)
    wanted[:20] = 1
    wanted[-20:] = total[-20:]
    p = np.where(wanted == total, 1.0, (wanted - 0.5) / total)
    with np.errstate(divide="ignore"):  # what has no part was removed before
        logits = jnp.asarray(np.log(parts) + rng.normal(size=(200, 1)), jnp.float32)
    left = np.isfinite(jax.jit(lambda logits, p: TopP(p)(logits, None))(logits, p))
    for row in range(200):
        order = sorted(range(8), key=lambda token: -parts[row, token])
        reached = np.cumsum(parts[row, order])
        expected = set(order[: np.flatnonzero(reached >= wanted[row])[0] + 1])
        assert set(np.flatnonzero(left[row])) == expected, (parts[row], p[row])


def places(text, gram):
    """How often a short text stands in a longer one."""
    return sum(text[start : start + len(gram)] == gram for start in range(len(text)))


@pytest.mark.thorough
@pytest.mark.report(
    "OpenNMT/OpenNMT-py#1573",
    "facebookresearch/fairseq#5206",
    listed="second 40",
    right="a token is removed exactly if it would write an n-gram again, or end a bad word",
)
def test_what_may_not_be_written_again():
    rng = np.random.default_rng(1)
    letters, rows, words = 4, 100, [[1], [2, 3], [0, 1, 2], [3, 3, 3, 3]]
    tokens = rng.integers(0, letters, (rows, 9))
    length = rng.integers(1, 10, rows)  # what stands behind it is no text
    history = History(*map(jnp.asarray, (tokens, length, rng.integers(1, length + 1))))
    logits = jnp.asarray(rng.normal(size=(rows, letters)), jnp.float32)
    filters = {n: NoRepeatNgram(n) for n in (1, 2, 3)} | {"words": BadWords(words)}
    removed = {name: np.isneginf(jax.jit(one)(logits, history)) for name, one in filters.items()}
    for row, token in np.ndindex(rows, letters):
        text = [*tokens[row, : length[row]].tolist(), token]
        for n in (1, 2, 3):
            again = len(text) >= n and places(text, text[-n:]) > 1
            assert removed[n][row, token] == again, (n, text)
        bad = any(text[-len(word) :] == word for word in words)
        assert removed["words"][row, token] == bad, text


@pytest.mark.thorough
@pytest.mark.report("kingoflolz/mesh-transformer-jax#164", right="top-k of 1 leaves one token")
def test_top_k_counts_from_one():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(50))
    order = np.argsort(-probabilities)
    for k in (1, 2, 49, 50):
        assert kept(TopK(k), probabilities) == sorted(order[:k].tolist())


@pytest.mark.thorough
@pytest.mark.report(
    "ml-explore/mlx-lm#388", "guidance-ai/guidance#1325",
    right="top-p sees the probabilities that top-k left, and never removes all of them",
)  # fmt: skip
def test_filters_in_a_row_leave_the_likeliest_token():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300)), jnp.float32)
    for temperature in (0.01, 1.0, 50.0):
        sampling = Sampling(temperature, top_k=1, top_p=0.1, min_p=1.0, typical=0.1)
        left = logits
        for one in sampling.filters():
            left = one(left, None)
        assert np.flatnonzero(np.isfinite(left[0])).tolist() == [int(jnp.argmax(logits))]


@pytest.mark.report(
    "google-deepmind/simply#42",
    right="top-p of 0 is refused by name, it does not empty the vocabulary",
)
def test_a_share_of_nothing_is_refused():
    for wrong in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="TopP"):
            Sampling(top_p=wrong)
    assert kept(MinP(0.0), [0.5, 0.5]) == [0, 1]


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/TensorRT-LLM#1590",
    "microsoft/onnxruntime-genai#1363",
    right="a token that a filter removed is never drawn",
)
def test_removed_tokens_are_never_drawn():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(
        np.where(rng.random((64, 700)) < 0.98, -np.inf, 30 * rng.normal(size=(64, 700))),
        jnp.float32,
    )
    logits = logits.at[:, 699].set(-jnp.inf).at[:, 5].set(0.0)
    drawn = jax.jit(draw)
    for seed in range(20):
        tokens = drawn(logits, jax.random.split(jax.random.key(seed), 64), 1.0)
        assert np.isfinite(
            np.take_along_axis(np.asarray(logits), np.asarray(tokens)[:, None], axis=1)
        ).all()


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/text-generation-inference#1765",
    right="penalties count the tokens of the text, not the padding behind it",
)  # fmt: skip
def test_penalties_do_not_count_padding():
    logits = jnp.zeros((2, V))
    tokens = jnp.array([[1, 2, 2, 0, 0, 0], [1, 2, 2, 0, 3, 3]])
    history = History(tokens, jnp.array([3, 5]), jnp.array([1, 1]))
    found = Frequency(1.5)(logits, history)
    np.testing.assert_array_equal(found, [[0, 0, -3, 0, 0, 0, 0], [-1.5, 0, -3, -1.5, 0, 0, 0]])


# --- options


@pytest.mark.report(
    "2U1/Molmo-Finetune#1",
    right="a stop token that the model cannot write is refused, not waited for",
    hit="stop_tokens=[50256] of a vocabulary of 7 was taken and stopped nothing",
)  # fmt: skip
def test_a_stop_token_outside_the_vocabulary_is_refused():
    for stop in ([V], [-2]):
        with pytest.raises(ConfigError, match="stop_tokens"):
            generate(TINY, params(), [[1, 2]], 4, stop_tokens=stop)
        with pytest.raises(ConfigError, match="stop_tokens"):
            search(TINY, params(), [[1, 2]], 4, stop_tokens=stop)


# --- the text of a run


def character_tokenizer(text, byte_fallback=False):
    """A tokenizer.json with a token for each character, as Llama 2 has bytes for all others."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE as Pairs

    names = [
        "<unk>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256) if byte_fallback),
        *sorted(set(text)),
    ]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        Pairs(vocab=vocabulary, merges=[], byte_fallback=byte_fallback, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["</s>", "<|turn|>"])
    return BPE(tokenizer.to_str())


@pytest.fixture
def run_that_says(monkeypatch):
    """A run without files, whose model says these tokens; the run's list `asked` has the options of
    each call."""

    def make(tokenizer, answer, data=None):
        model = replace(TINY, vocab_size=tokenizer.vocab_size, context_length=256)
        experiment = Experiment(
            name="x", model=model, data=Corpus("nowhere") if data is None else data
        )
        opened = runs.Run(RunFolder(epath.Path("nowhere")), experiment)
        recipe, asked = SimpleNamespace(weights=lambda tree: tree), []
        opened.__dict__.update(
            tokenizer=tokenizer, mesh=None, checkpoint=(0, None, {}), recipe=recipe, asked=asked
        )

        def stream(_config, _params, prompt, _room, stop=None, **options):
            asked.append(options | {"prompt": prompt})
            for n, token in enumerate(answer, 1):
                yield [token]
                if stop is not None and stop(list(answer[:n])) is not None:
                    return

        monkeypatch.setattr(runs, "stream", stream)
        return opened

    return make


LETTERS = "abcdefghijklmnopqrstuvwxyz ."


@pytest.mark.report(
    "Blaizzy/mlx-vlm#1076",
    "mlc-ai/mlc-llm#1397",
    right="streamed text is the text at once",
    listed="first 03",
    hit=(
        "an emoji of four byte tokens came out as replacement characters, and the text after it "
        "was lost"
    ),
)
def test_streamed_bytes_are_the_text_at_once(run_that_says):
    """Also where the bytes end as no character, which turns those before them into U+FFFD, too."""
    tokenizer = character_tokenizer(LETTERS, byte_fallback=True)
    first = tokenizer.id_of("<0xF0>")
    whole = tokenizer.encode("ok \U0001f600\U0001f389 the end \u65e5\u672c")
    broken = [*tokenizer.encode("a\U0001f600"), first, *tokenizer.encode("b\u65e5"), first]
    for answer in (whole, broken, [first] * 3, tokenizer.encode("\ufffd ok")):
        pieces = list(run_that_says(tokenizer, answer).stream("say"))
        assert "".join(pieces) == continuation(tokenizer.decode, tokenizer.encode("say"), answer)
    shown = list(run_that_says(tokenizer, whole).stream("say"))
    assert shown[:3] == ["o", "k", " "]  # nothing waits that no byte can change


@pytest.mark.report(
    "SharpAI/SwiftLM#126",
    "vllm-project/vllm#3574",
    right="no part of a stop string is shown, wherever its tokens end",
    hit="the first letter of a stop string was shown where its next character came in byte tokens",
)
def test_no_part_of_a_stop_string_is_streamed(run_that_says):
    tokenizer = character_tokenizer(LETTERS, byte_fallback=True)
    for text, stop, wanted in (
        ("abc\U0001f600 more", "c\U0001f600", "ab"),
        ("the own fox", "own fox", "the "),
        ("one. two. three", ". t", "one"),
        ("ab ab abc", "abc", "ab ab "),
        ("never", "z", "never"),
        ("ends with a", "ab", "ends with a"),
    ):
        pieces = list(run_that_says(tokenizer, tokenizer.encode(text)).stream("say", stop=[stop]))
        assert "".join(pieces) == wanted


@pytest.mark.report(
    "Lightning-AI/litgpt#812",
    "google/tunix#592",
    right="a text ends with the token that ends a document",
    listed="first 21",
    hit="`generate` of a run on documents wrote that token and another document",
)
def test_generation_of_a_corpus_stops_at_the_end_of_a_document(run_that_says):
    tokenizer = character_tokenizer(LETTERS)
    for data in (Corpus("nowhere"), Mixed(((0.5, Corpus("one")), (0.5, Corpus("two"))))):
        opened = run_that_says(tokenizer, tokenizer.encode("a cat."), data)
        assert opened.generate("the ") == "the a cat."
        assert opened.asked[0]["stop_tokens"] == (tokenizer.end_of_text,)
    assert runs.ends_of(object(), tokenizer) == ()  # data of a user's own without documents


@pytest.mark.report(
    "SciSharp/LLamaSharp#1112",
    right="an option reads control tokens of a prompt; by default they are text",
    listed="first 23",
    hit="there was no option: <|im_start|> became ordinary pieces",
)
def test_control_tokens_of_a_prompt_are_read_where_they_are_asked_for(run_that_says):
    tokenizer = character_tokenizer(LETTERS + "<|>")
    opened = run_that_says(tokenizer, [])
    prompt, turn = "<|turn|>hello", tokenizer.id_of("<|turn|>")
    opened.generate(prompt)
    opened.generate(prompt, special_tokens=True)
    plain, special = (asked["prompt"] for asked in opened.asked)
    assert turn not in plain and tokenizer.decode(plain) == prompt
    assert special == [turn, *tokenizer.encode("hello")]
    assert tokenizer.encode(prompt) == plain  # the tokenizer of the run is as it was


@pytest.mark.report(
    "ggml-org/llama.cpp#1362",
    "ggml-org/llama.cpp#1173",
    right="a stop string of the command line may name a line end",
    hit="--stop '\\n' was a backslash and an n, and stopped nothing",
)
def test_escapes_of_the_command_line():
    assert unescaped(r"\n\n") == "\n\n" and unescaped("\n") == "\n"
    assert unescaped(r"a\tb\\n\d") == "a\tb\\n\\d"
    assert unescaped("日本") == "日本"


@pytest.mark.report(
    "wbolster/jsonlines#68",
    right="a file of prompts may begin with a byte order mark, as files of data may",
    hit="`generate --prompts` refused it",
)
def test_a_file_of_prompts_may_begin_with_a_byte_order_mark(tmp_path):
    asked = SimpleNamespace(
        continue_all=lambda prompts, **_: [[prompt.upper()] for prompt in prompts]
    )
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for start in (b"", b"\xef\xbb\xbf"):
        source.write_bytes(start + '{"prompt": "é"}\n'.encode())
        _generate_file(asked, str(source), str(target))
        assert "\\u00c9" in target.read_text()


# --- what is handed in


@pytest.mark.thorough
@pytest.mark.report(
    "verl-project/verl#772",
    "PaddlePaddle/FastDeploy#3944",
    right=(
        "prompts may be arrays, with rows of equal length or a list of them, in every kind of "
        "decoding"
    ),
    hit=(
        "an array of prompts ended in 'the truth value of an array is ambiguous', as did 8 stop "
        "tokens of NumPy"
    ),
)
@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_prompts_and_stop_tokens_may_be_arrays(as_users_call, array):
    prompts, stops = [[1, 2], [3, 4]], [5]
    lists = generate(TINY, params(), prompts, 4, sampling=GREEDY, stop_tokens=stops)
    for same in (array(prompts), [array(prompt) for prompt in prompts]):
        assert generate(TINY, params(), same, 4, sampling=GREEDY, stop_tokens=array(stops)) == lists
        # as many as compile nothing new
        with pytest.raises(ConfigError, match="stop_tokens: 9 is outside"):
            generate(TINY, params(), same, 4, stop_tokens=array([1, 2, 3, 4, 5, 6, 0, 9]))
    assert (
        generate(
            TINY,
            params(),
            array(prompts),
            np.array([4, 4]),
            sampling=GREEDY,
            stop_tokens=array(stops),
        )
        == lists
    )


@pytest.mark.report(
    "PaddlePaddle/FastDeploy#3944",
    right="beams, contrastive search, speculation and scores take arrays, too",
    hit="the same ValueError, and a set of JAX's arrays is none",
)
@pytest.mark.thorough
def test_every_kind_of_decoding_takes_arrays(as_users_call):
    prompts, stops = [[1, 2], [3, 4]], jnp.array([5])
    for function in (
        lambda p: search(TINY, params(), p, 3, stop_tokens=stops, beams=Beams(2)),
        lambda p: contrast(TINY, params(), p, [3, 2], stop_tokens=stops),
        lambda p: (
            speculate(
                TINY, params(), p, [3, 2], draft=Lookup(), stop_tokens=stops, sampling=GREEDY
            ).tokens
        ),
        lambda p: score(TINY, params(), p, p),
    ):
        assert function(np.array(prompts)) == function(prompts)


@pytest.mark.report(
    "vllm-project/vllm#342",
    "ml-explore/mlx-lm#1689",
    right="one text in place of a list, no texts, rows=0 and too few limits are refused by name",
    hit=(
        "search, contrast and speculate took the length of a number; score of nothing ended in "
        "min() of nothing"
    ),
)
@pytest.mark.parametrize("function", ["generate", "search", "contrast", "speculate", "score"])
def test_what_is_no_list_of_texts_is_refused(as_users_call, function):
    calls = {
        "generate": lambda p, max_tokens=3, **more: generate(TINY, params(), p, max_tokens, **more),
        "search": lambda p, max_tokens=3, **more: search(TINY, params(), p, max_tokens, **more),
        "contrast": lambda p, max_tokens=3, **more: contrast(TINY, params(), p, max_tokens, **more),
        "speculate": lambda p, max_tokens=3, **more: speculate(
            TINY, params(), p, max_tokens, draft=Lookup(), **more
        ),
        "score": lambda p, **more: score(TINY, params(), p, p, **more),
    }
    call = calls[function]
    if function != "score":
        with pytest.raises(ConfigError, match="max_tokens="):  # as many numbers as prompts
            calls[function]([[1, 2], [3]], max_tokens=[4])
    for prompts, said in (
        ([1, 2], "a list of tokens for each"),
        (np.array([1, 2]), "a list of tokens for each"),
        ([], "empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            call(prompts)
    with pytest.raises(ConfigError, match="rows=0"):
        call([[1, 2]], rows=0)


@pytest.mark.report(
    "blackjax-devs/blackjax#703",
    "gchq/coreax#331",
    right="a key of the old kind is a key; a number is refused by name",
    hit="speculate could not broadcast an old key, and a number as key was a TypeError of JAX",
)
def test_keys_of_both_kinds(as_users_call):
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    assert (jax.random.key_data(as_key(old)) == jax.random.key_data(new)).all()
    assert as_key(new) is new
    for wrong, shown in (
        (3, "3"),
        (jax.random.split(new), r"\[2\]"),
        (np.zeros(2), r"float64\[2\]"),
        (np.int64(3), r"int64\[\]"),
    ):
        with pytest.raises(
            ConfigError, match=f"key={'.*' if shown[0] == chr(92) else ''}{shown}: expected one key"
        ):
            as_key(wrong)


@pytest.mark.report(
    "vllm-project/vllm#16529",
    right="a filter that names a token outside the vocabulary is refused",
    hit="LogitBias left it out in silence, and ForcedPrefix ended the text at once",
)
def test_filters_name_tokens_of_the_model(as_users_call):
    for wrong in (
        LogitBias({1: 2.0, V: -1.0}),
        ForcedPrefix([1, V]),
        ForcedPrefix(np.array([[V + 5]])),
    ):
        with pytest.raises(
            ConfigError, match=f"filters: number 2: token .* is outside the vocabulary of {V}"
        ):
            generate(TINY, params(), [[1]], 2, filters=[TopK(3), wrong])
    for right in (LogitBias({V - 1: 9.0}), LogitBias(np.zeros(V)), ForcedPrefix([-1, V - 1])):
        as_filters([right], SimpleNamespace(config=TINY, cache_length=16))


@pytest.mark.report(
    "triton-inference-server/tensorrtllm_backend#473",
    "predibase/lorax#474",
    right="more tokens ahead than a text may have are no error: the draft proposes what fits",
    hit=(
        "ahead=16 for a short text was 'rows of 17 tokens do not fit a cache', of a function "
        "that nobody called"
    ),
)
@pytest.mark.thorough
def test_a_draft_may_look_further_than_the_text_goes():
    plain = generate(TINY, params(), [[1, 2, 1]], 5, sampling=GREEDY)
    for draft in (Lookup(), Draft(TINY, params())):
        assert (
            speculate(TINY, params(), [[1, 2, 1]], 5, draft=draft, ahead=40, sampling=GREEDY).tokens
            == plain
        )


@pytest.mark.report(
    "ggozad/oterm#189", right="one stop string without brackets is a string, not its letters",
    hit="stop='END' ended a text at the first E",
)  # fmt: skip
def test_one_stop_string_is_no_list_of_letters(monkeypatch):
    assert as_strings("END") == ["END"] and as_strings(["E", "D"]) == ["E", "D"]
    monkeypatch.setattr(
        "jaxformer.evaluation.generation.generate", lambda *_, **__: [[*b"THE DOG END"]]
    )
    asked = [Question([0], "")]
    for stop, text in (("END", "THE DOG "), (["E"], "TH"), ((), "THE DOG END")):
        assert answers(
            TINY, None, asked, SimpleNamespace(decode=written), 16, GREEDY, stop=stop
        ) == [[text]]


def written(tokens):
    """Of token 0 nothing, else the bytes."""
    return bytes(token for token in tokens if token).decode()


class Favours:
    """A user's filter that names its token."""

    def __call__(self, logits, history):
        return logits.at[:, 3].add(5.0)

    def named_tokens(self):
        return [V + 2]


@pytest.mark.report(
    "huggingface/text-generation-inference#3186",
    right=(
        "a filter says itself which tokens it makes likely, and one outside the vocabulary is "
        "refused before any work"
    ),
    hit="two filters were known by their names, so a filter of the user's could not say it",
)
def test_a_filter_says_which_tokens_it_names(as_users_call):
    model = SimpleNamespace(config=TINY, cache_length=16)
    for number in (Favours(), LogitBias({V: 1.0}), ForcedPrefix([1, V])):
        with pytest.raises(ConfigError, match=r"number 1: token \d is outside the vocabulary of 7"):
            as_filters((number,), model)
    right = (
        LogitBias({V - 1: 1.0}),
        LogitBias(np.zeros(V)),
        ForcedPrefix([1, -1]),
        lambda logits, _: logits,
    )
    assert len(as_filters(right, model)) == 4


@pytest.mark.report(
    "huggingface/text-generation-inference#1254",
    "mzau/mlx-knife#68",
    "LostRuins/koboldcpp#1031",
    "NovaSky-AI/SkyRL#778",
    right=(
        "what may become a stop string waits, comes when it does not, and a text ends before the "
        "string inside a token"
    ),
)
@pytest.mark.parametrize(
    "text", ["say pleas", "<|im_start|>", "a <|im_end|> b", "x<|im<|im_end|>", "<|im_end"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_with_a_stop_string_are_the_text_before_it(text, size):
    stop, shown, seen = ["<|im_end|>", "assistant"], "", ""
    for start in range(0, len(text), size):
        seen += text[start : start + size]
        before = before_stop(seen, stop)
        shown = before[: max(len(shown), len(before) - runs._held_back(before, stop))]
        assert text.split("<|im_end|>")[0].startswith(shown)
    assert shown + before_stop(seen, stop)[len(shown) :] == text.split("<|im_end|>")[0]


PADDED = {
    "learned": TINY,
    "rotary, in a window": replace(
        TINY, positions=Rope(), masks=(masks.causal() & masks.window(3),)
    ),
    "alibi": replace(TINY, positions=Alibi()),
    "relative": replace(TINY, positions=Relative(6, 8, False)),
    "positions in attention": replace(TINY, positions=AttentionPositions(Sinusoidal())),
    "linear attention": replace(TINY, mixer=zoo.Linear()),
    "experts": replace(TINY, feedforward=Mixture(experts=4, top_k=2, d_ff=8)),
    "prefix": replace(TINY, masks=(masks.causal() | masks.prefix(2),)),
}


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth#3699",
    "unslothai/unsloth#9708",
    "huggingface/transformers#22707",
    "Blaizzy/mlx-vlm#1542",
    "TransformerLensOrg/TransformerLens#1005",
    right=(
        "prompts of different lengths that are read in one batch are continued as each alone; "
        "nobody sees padding"
    ),
)
@pytest.mark.parametrize("name", PADDED)
def test_prompts_in_one_batch_are_continued_as_alone(name):
    config = PADDED[name]
    tree = models.init(config, jax.random.key(3))
    prompts = [[1, 2, 3, 4, 5, 6], [6, 5, 4], [2, 2, 6, 1], [3, 1, 2, 5, 4]]
    together = generate(config, tree, prompts, 6, sampling=GREEDY)
    assert together == [
        generate(config, tree, [prompt], 6, sampling=GREEDY)[0] for prompt in prompts
    ]
