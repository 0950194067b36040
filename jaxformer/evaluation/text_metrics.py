"""Scores of texts: functions `(hypotheses, references) -> {name: score or signature}`.

A score is a number from 0 to 100. A signature is a text that says how the score was computed.
Hypothesis i is a model's answer, and reference i is the right answer to the same question. Each
function raises ConfigError for empty lists, lists of different length, anything that is no text,
and a missing package.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxformer.errors import ConfigError, package_of

Scores = dict[str, float | str]
# writing systems without spaces between words, as ranges of a regular expression
HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"
SOUTH_EAST = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
SPACELESS = HAN + KANA + SOUTH_EAST
ENGLISH = ("a", "an", "the")  # articles


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str | None = None
) -> Scores:
    """Corpus BLEU and its signature, by sacrebleu (Post 2018), case-sensitive.

    `tokenize` is one of sacrebleu's tokenizers. None is 13a, or zh if most letters of the
    references are Chinese, because 13a takes a whole Chinese sentence as one word. For references
    in another writing system without spaces, no default suits all languages: give `tokenize`,
    otherwise ConfigError is raised. In an experiment: `partial(bleu, tokenize="char")`.
    """
    hypotheses, references = _checked(hypotheses, references)
    with package_of("metrics"):
        from sacrebleu.metrics import BLEU
    chosen = bleu_tokenizer(references) if tokenize is None else tokenize
    try:
        metric = BLEU(tokenize=chosen, lowercase=False)
    except (KeyError, ValueError, RuntimeError, ImportError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"bleu: tokenize={chosen!r}: {problem}; tokenize='char' is always there"
        ) from None
    score = metric.corpus_score(hypotheses, [references]).score
    # the signature is complete only after scoring
    return {"bleu": score, "bleu_signature": str(metric.get_signature())}


def bleu_tokenizer(references: Sequence[str]) -> str:
    """The name of sacrebleu's tokenizer for these references.

    Raises ConfigError for a writing system without spaces that is not Chinese.
    """
    text = "".join(references)
    letters = sum(map(str.isalpha, text))
    spaceless = [letter for letter in re.findall(f"[{SPACELESS}]", text) if letter.isalpha()]
    if 2 * len(spaceless) <= letters:
        return "13a"
    if all(re.match(f"[{HAN}]", letter) for letter in spaceless):
        return "zh"
    options = "'char' (characters), 'ja-mecab' (Japanese words) or another of sacrebleu"
    raise ConfigError(
        f"bleu: the references are in a script without spaces; give tokenize={options}"
    )


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus chrF (Popovic 2015) by sacrebleu, and its signature: F2 of n-grams of characters.

    The n-grams have up to 6 characters.
    """
    hypotheses, references = _checked(hypotheses, references)
    with package_of("metrics"):
        from sacrebleu.metrics import CHRF
    metric = CHRF()
    score = metric.corpus_score(hypotheses, [references]).score
    return {"chrf": score, "chrf_signature": str(metric.get_signature())}


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """ROUGE-1, -2, -L, -Lsum (Lin 2004) by rouge-score: 100 x the mean F-measure over texts.

    Words are those of `unicode_words`, stemmed. For ASCII text they are the package's own words, so
    the scores are the package's own too. ROUGE-Lsum takes each line as a sentence.
    """
    hypotheses, references = _checked(hypotheses, references)
    with package_of("metrics"):
        from importlib.metadata import version

        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(names, tokenizer=StemmedWords(DefaultTokenizer(use_stemmer=True)))
    pairs = zip(hypotheses, references, strict=True)
    results = [scorer.score(reference, text) for text, reference in pairs]
    means = {name: _percent([scores[name].fmeasure for scores in results]) for name in names}
    signature = f"tokenizer:unicode|stemmer:porter|sentences:lines|version:{version('rouge-score')}"
    return means | {"rouge_signature": signature}


class StemmedWords:
    """A tokenizer for rouge-score: `unicode_words`, with ASCII words stemmed by the package."""

    def __init__(self, stemmer: Any):
        self.stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        stems: list[str] = []
        for word in unicode_words(text):
            stems += self.stemmer.tokenize(word) if word.isascii() else [word]
        return stems


def unicode_words(text: str) -> list[str]:
    """The words of a text in any writing system, in lower case.

    A word is a run of letters, their marks, and digits. If the writing system has no spaces between
    words, each letter with its marks is a word. A symbol that is not ASCII, such as an emoji, is a
    word. The two encodings of an accented letter give the same word.
    """
    words: list[str] = []
    takes_letters = False  # whether letters and marks may join the last word
    takes_marks = False  # whether marks alone may join it
    for letter in unicodedata.normalize("NFC", text.lower()):
        category = unicodedata.category(letter)
        single = (category == "So" and not letter.isascii()) or (
            category[0] in "LN" and re.match(f"[{SPACELESS}]", letter)
        )
        if category == "Cf":  # invisible: joiners, soft hyphens, directions
            continue
        if category[0] == "M" and words and (takes_letters or takes_marks):
            words[-1] += letter
            continue
        is_letter = category[0] in "LMN"  # or a mark, or a digit
        if single or (is_letter and not takes_letters):
            words.append(letter)
        elif is_letter:
            words[-1] += letter
        takes_letters = is_letter and not single
        takes_marks = bool(single)
    return words


def exact_match(
    hypotheses: Sequence[str], references: Sequence[str], articles: Sequence[str] = ENGLISH
) -> Scores:
    """100 x the share of texts that equal their reference, both normalised as in SQuAD.

    Rajpurkar et al. 2016, section 6.1. Punctuation does not count; it is that of Unicode, so 。 and
    curly quotes do not count either, as in MLQA (Lewis et al. 2020). `articles` do not count. The
    default is English; in another language "a" may be a verb, so give its articles, or ().
    """
    hypotheses, references = _checked(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    equal = [_words(text, articles) == _words(reference, articles) for text, reference in pairs]
    return {"exact_match": _percent(equal)}


def token_f1(
    hypotheses: Sequence[str], references: Sequence[str], articles: Sequence[str] = ENGLISH
) -> Scores:
    """100 x the mean F1 of the bags of words of text and reference, both normalised as in SQuAD.

    Rajpurkar et al. 2016, section 6.1. If a writing system has no spaces between words, each
    character is a word, as in MLQA (Lewis et al. 2020). If text or reference has no word, F1 is 1
    if both have none, otherwise 0 (SQuAD 2.0).
    """
    hypotheses, references = _checked(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    scores = [
        _f1(_pieces(text, articles), _pieces(reference, articles)) for text, reference in pairs
    ]
    return {"token_f1": _percent(scores)}


def _pieces(text: str, articles: Sequence[str]) -> list[str]:
    """The normalised words; letters of a writing system without spaces are separate pieces."""
    return [
        piece
        for word in _words(text, articles)
        for piece in re.findall(f"[{SPACELESS}]|[^{SPACELESS}]+", word)
    ]


def _f1(text: list[str], reference: list[str]) -> float:
    if not text or not reference:
        return float(text == reference)
    return 2 * (Counter(text) & Counter(reference)).total() / (len(text) + len(reference))


def _words(text: str, articles: Sequence[str]) -> list[str]:
    """The words in lower case, without punctuation and articles.

    The two encodings of an accented letter give the same word. Raises ConfigError for `articles`
    that are one string.
    """
    if isinstance(articles, str):
        raise ConfigError(
            f"articles={articles!r}: its letters would be the articles; give a list of words"
        )
    text = unicodedata.normalize("NFC", text).lower()
    text = "".join(letter for letter in text if not _is_punctuation(letter))
    if articles:
        text = re.sub(rf"\b({'|'.join(map(re.escape, articles))})\b", " ", text)
    return text.split()


def _is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter)[0] == "P"


def _percent(values: Sequence[Any]) -> float:
    return 100 * sum(values) / len(values)


def _checked(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[str]]:
    """Both as lists of texts. Raises ConfigError for what cannot be scored pair by pair."""
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise ConfigError(
            "a text alone would be scored letter by letter; give lists: bleu([text], [reference])"
        )
    hypotheses, references = list(hypotheses), list(references)
    for name, texts in (("text", hypotheses), ("reference", references)):
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                problem = f"{name} {number} is a {type(text).__name__}, not a text"
                raise ConfigError(
                    f"{problem}; each text is scored against one reference: "
                    "bleu([text], [reference])"
                )
    if len(hypotheses) != len(references) or not hypotheses:
        raise ConfigError(
            f"{len(hypotheses)} texts and {len(references)} references: "
            "expected as many of both, and some"
        )
    return hypotheses, references
