"""Scores of texts are those of the packages called directly, and of SQuAD's rules applied by
hand."""

import random

import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation import text_metrics

WORDS = [
    "The",
    "the",
    "cat",
    "cats",
    "sat,",
    "on",
    "a",
    "mat.",
    "running",
    "ran",
    "isn't",
    "3.5",
    "Straße",
    "naïve",
]
FUNCTIONS = ("bleu", "chrf", "rouge", "exact_match", "token_f1")


def texts(seed):
    """(hypotheses, references): words of a small vocabulary, some texts equal, some empty, some of
    two lines."""
    rng = random.Random(seed)
    text = lambda: " ".join(rng.choice([*WORDS, "\n"]) for _ in range(rng.randrange(12)))
    references = [text() for _ in range(30)] + ["the cat sat"]
    return [reference if rng.random() < 0.2 else text() for reference in references], references


@pytest.mark.parametrize("seed", range(3))
def test_bleu_and_chrf_are_sacrebleus(seed):
    import sacrebleu

    hypotheses, references = texts(seed)
    scores = text_metrics.bleu(hypotheses, references)
    assert scores["bleu"] == sacrebleu.corpus_bleu(hypotheses, [references]).score > 0
    signature = f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert scores["bleu_signature"] == signature
    assert text_metrics.bleu([h.lower() for h in hypotheses], references)["bleu"] != scores["bleu"]
    scores = text_metrics.chrf(hypotheses, references)
    assert scores["chrf"] == sacrebleu.corpus_chrf(hypotheses, [references]).score > 0
    assert scores["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")


@pytest.mark.parametrize("seed", range(3))
def test_rouge_is_rouge_scores(seed):
    from rouge_score.rouge_scorer import RougeScorer

    # of other letters the package makes spaces
    ascii_only = lambda some: [text.replace("ß", "ss").replace("ï", "i") for text in some]
    hypotheses, references = map(ascii_only, texts(seed))
    scores = text_metrics.rouge(hypotheses, references)
    assert scores.pop("rouge_signature").startswith(
        "tokenizer:unicode|stemmer:porter|sentences:lines|version:"
    )
    for name, value in scores.items():
        scorer = RougeScorer([name], use_stemmer=True)
        values = [
            scorer.score(target=r, prediction=h)[name].fmeasure
            for h, r in zip(hypotheses, references, strict=True)
        ]
        assert value == pytest.approx(100 * sum(values) / len(values), rel=1e-12)
    assert len(scores) == 4 and scores["rougeLsum"] != scores["rougeL"]


def test_exact_match_and_f1_by_hand():
    references = ["The Eiffel Tower", "in 1923", "a cat", "the", "yes"]
    hypotheses = ["eiffel  tower!", "in the year 1923.", "dog", "", ""]
    # the first, the fourth
    assert text_metrics.exact_match(hypotheses, references) == {"exact_match": pytest.approx(40)}
    # in year 1923 / in 1923: two words in common, precision 2/3, recall 1; "the" has no word, as
    # the empty answer
    expected = (1 + 2 * (2 / 3) / (5 / 3) + 0 + 1 + 0) / 5
    assert text_metrics.token_f1(hypotheses, references) == {
        "token_f1": pytest.approx(100 * expected)
    }
    # a word counts as often
    assert text_metrics.token_f1(["x x y"], ["x y y"]) == {"token_f1": pytest.approx(200 / 3)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_texts_score_100_and_none_are_refused(name):
    function, same = (
        getattr(text_metrics, name),
        ["one two three four five six", "seven eight nine ten eleven"],
    )
    assert all(
        isinstance(value, str) or value == pytest.approx(100)
        for value in function(same, same).values()
    )
    for hypotheses in ([], same[:1]):
        with pytest.raises(ConfigError, match="expected as many of both"):
            function(hypotheses, [] if not hypotheses else same)


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigError, match="pip install 'jaxformer\\[metrics\\]'"):
        text_metrics.bleu(["a"], ["a"])
