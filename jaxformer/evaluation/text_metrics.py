"""Scores of texts: `(hypotheses, references) -> {name: score, 0 to 100, or text that says how it was made}`.

Hypothesis i is a model's answer to what reference i answers. Each function raises ConfigError where there are none, where
the two differ in number, and where the package that computes the score is missing.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxformer.errors import ConfigError, package_of

Scores = dict[str, float | str]


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus BLEU and its signature, by sacrebleu (Post 2018): case-sensitive, tokenizer 13a."""
    _check(hypotheses, references)
    with package_of("metrics"):
        from sacrebleu.metrics import BLEU
    metric = BLEU(tokenize="13a", lowercase=False)
    score = metric.corpus_score(hypotheses, [references]).score
    return {"bleu": score, "bleu_signature": str(metric.get_signature())}  # the signature is complete after scoring


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus chrF (Popovic 2015) and its signature, by sacrebleu: F2 of character n-grams up to 6."""
    _check(hypotheses, references)
    with package_of("metrics"):
        from sacrebleu.metrics import CHRF
    metric = CHRF()
    score = metric.corpus_score(hypotheses, [references]).score
    return {"chrf": score, "chrf_signature": str(metric.get_signature())}


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """ROUGE-1, -2, -L, -Lsum (Lin 2004) by rouge-score, words stemmed: 100 x the mean F-measure over texts.

    ROUGE-Lsum takes each line as a sentence.
    """
    _check(hypotheses, references)
    with package_of("metrics"):
        from importlib.metadata import version

        from rouge_score.rouge_scorer import RougeScorer
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(names, use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(hypotheses, references, strict=True)]
    means = {name: _percent([scores[name].fmeasure for scores in found]) for name in names}
    return means | {"rouge_signature": f"stemmer:porter|sentences:lines|version:{version('rouge-score')}"}


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """The share of texts that equal their reference, both normalised as SQuAD does (Rajpurkar et al. 2016, section 6.1)."""
    _check(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    return {"exact_match": _percent([_words(text) == _words(reference) for text, reference in pairs])}


def token_f1(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """The mean F1 of the bags of words of text and reference, both normalised (Rajpurkar et al. 2016, section 6.1).

    Of two texts of which one has no word, F1 is 1 if both have none, else 0 (SQuAD 2.0).
    """
    _check(hypotheses, references)
    return {"token_f1": _percent([_f1(*map(_words, pair)) for pair in zip(hypotheses, references, strict=True)])}


def _f1(text: list[str], reference: list[str]) -> float:
    if not text or not reference:
        return float(text == reference)
    return 2 * (Counter(text) & Counter(reference)).total() / (len(text) + len(reference))


def _words(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _percent(values: Sequence[Any]) -> float:
    return 100 * sum(values) / len(values)


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ConfigError(f"{len(hypotheses)} texts and {len(references)} references: expected as many of both, and some")
