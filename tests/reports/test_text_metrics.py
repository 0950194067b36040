"""Scores of texts, tried against what users of sacrebleu, rouge-score and others reported."""

import unicodedata

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation import text_metrics
from jaxformer.evaluation.text_metrics import (
    bleu,
    chrf,
    exact_match,
    rouge,
    token_f1,
    unicode_words,
)

SENTENCES = {
    "Russian": "Птицы летят над рекой.",
    "Hindi": "चिड़िया नदी के ऊपर उड़ती है।",
    "Greek": "Τα πουλιά πετούν πάνω.",
    "Arabic": "الطيور تطير فوق النهر",
    "Korean": "새가 강 위를 난다.",
    "German": "Vögel über Flüssen",
    "Chinese": "鸟儿飞过小河。",
    "Japanese": "鳥が川の上を飛ぶ。",
    "Thai": "นกบินข้ามแม่น้ำ",
    "emoji": "🐦 🌊",
}
SPACELESS = ("Chinese", "Japanese", "Thai")
WORDS = [
    "a",
    "bird",
    "flies",
    "over",
    "the",
    "wide",
    "river",
    "and",
    "then",
    "a",
    "second",
    "bird",
    "follows",
    "it",
    "home",
]


@pytest.mark.report(
    "huggingface/evaluate#256", right="a text equals itself in every script", listed="first 04",
    hit="ROUGE kept a-z and 0-9 alone: 0 for a Russian text and itself",
)  # fmt: skip
@pytest.mark.parametrize("language", SENTENCES)
def test_rouge_reads_every_script(language):
    text = SENTENCES[language]
    scores = rouge([text], [text])
    assert scores["rouge1"] == scores["rougeL"] == 100
    if language in SPACELESS:  # a part of the sentence shares words with it
        assert 0 < rouge([text[:4]], [text])["rouge1"] < 100
    assert rouge([text], [SENTENCES["German" if language != "German" else "Greek"]])["rouge1"] == 0


@pytest.mark.report(
    "facebookresearch/fairseq#4689",
    right="words of Chinese are its characters; elsewhere the tokenizer is asked for",
    hit="13a took a whole sentence as one word: BLEU 0 for a good translation",
    listed="first 25",
)
def test_bleu_chooses_a_tokenizer_or_asks_for_one():
    near, text = "鸟儿飞过了小河，飞进树林。", "鸟儿飞过小河，飞进树林。"
    assert 40 < bleu([near], [text])["bleu"] < 100
    assert "tok:zh" in bleu([near], [text])["bleu_signature"]
    mixed = "The river 小河 is wide."  # most letters are Latin
    assert "tok:13a" in bleu([mixed], [mixed])["bleu_signature"]
    for language in ("Japanese", "Thai"):
        some = [SENTENCES[language]]
        with pytest.raises(ConfigError, match="script without spaces; give tokenize='char'"):
            bleu(some, some)
        assert bleu(some, some, tokenize="char")["bleu"] == pytest.approx(100)
    with pytest.raises(ConfigError, match="tokenize='klingon'"):
        bleu(["a"], ["a"], tokenize="klingon")


@pytest.mark.report(
    "mjpost/sacrebleu#99", "mjpost/sacrebleu#121", right="a text where a list belongs is refused",
    hit="two strings of one length were scored letter by letter, without a word",
)  # fmt: skip
@pytest.mark.parametrize("metric", [bleu, chrf, rouge, exact_match, token_f1])
def test_a_text_alone_is_no_list_of_texts(metric):
    for texts in (("the cat", "the dog"), (["the cat"], "t"), ("t", ["the cat"])):
        with pytest.raises(ConfigError, match="scored letter by letter; give lists"):
            metric(*texts)


@pytest.mark.report(
    "vibrantlabsai/ragas#2888",
    "mjpost/sacrebleu#281",
    right="every answer counts, each beside its own reference",
)
@pytest.mark.parametrize("metric", [bleu, chrf, rouge, exact_match, token_f1])
def test_the_last_text_counts_as_the_first(metric):
    references = [" ".join(WORDS[i : i + 6]) for i in range(8)]
    value = lambda texts: next(iter(metric(texts, references).values()))
    perfect = value(references)
    for place in (0, 7):
        assert (
            value([*references[:place], "nothing of this", *references[place + 1 :]]) < perfect - 1
        )
    assert value(references[1:] + references[:1]) < perfect - 1  # shifted by one


@pytest.mark.report(
    "mjpost/sacrebleu#132", right="an empty answer is a wrong one, not a missing one"
)
def test_empty_answers_score_nothing():
    references = [" ".join(WORDS[:6]), " ".join(WORDS[6:12])]
    for metric in (bleu, chrf, rouge, exact_match, token_f1):
        assert next(iter(metric(["", ""], references).values())) == 0
    assert bleu([references[0], ""], references)["bleu"] < bleu(references, references)["bleu"] / 2


@pytest.mark.report("mjpost/sacrebleu#161", right="an empty reference is a line like any other")
def test_an_empty_reference_is_no_error():
    for metric in (bleu, chrf, rouge, exact_match, token_f1):
        value = next(iter(metric(["a bird flies over", ""], ["a bird flies over", ""]).values()))
        assert 0 <= value <= 100.0001
    assert token_f1([""], [""])["token_f1"] == exact_match([""], [""])["exact_match"] == 100


@pytest.mark.report(
    "Lightning-AI/torchmetrics#3480", right="garbage for one sentence never raises the corpus score"
)
def test_garbage_never_raises_chrf():
    references = ["a bird flies home", "the river is wide"]
    half = chrf(["a bird flies home", "the rover was wise"], references)["chrf"]
    assert chrf(["a bird flies home", "qqqq xxxx"], references)["chrf"] < half
    assert chrf(["a bird flies home", ""], references)["chrf"] < half


@pytest.mark.report(
    "huggingface/evaluate#501",
    "google-research/google-research#168",
    right="ROUGE-Lsum takes lines as sentences and says so",
)
def test_lines_are_the_sentences_of_rouge_lsum():
    """The sentences in another order: the union of their matches is the same, one long match is
    not."""
    reference, turned = (
        "a bird flies home\nthe river is wide",
        "the river is wide\na bird flies home",
    )
    scores = rouge([turned], [reference])
    assert scores["rougeLsum"] == 100 > scores["rougeL"]
    assert "sentences:lines" in scores["rouge_signature"]
    assert rouge([turned.replace("\n", " ")], [reference.replace("\n", " ")])["rougeLsum"] < 100


@pytest.mark.report(
    "cosmoquester/2021-dialogue-summary-competition#20",
    right="a word that is written twice matches one of the reference once",
)
def test_a_repeated_word_does_not_match_twice():
    once, twice = (rouge(["A C B"], [text])["rouge1"] for text in ("A B C D E F", "A B C D E F C"))
    assert once == pytest.approx(100 * 2 * 3 / (6 + 3)) and twice == pytest.approx(
        100 * 2 * 3 / (7 + 3)
    )
    assert rouge(["bird bird bird"], ["bird home"])["rouge1"] == pytest.approx(
        100 * 2 * 1 / (3 + 2)
    )
    assert token_f1(["bird bird bird"], ["bird home"])["token_f1"] == pytest.approx(
        100 * 2 * 1 / (3 + 2)
    )


@pytest.mark.report("pltrdy/rouge#45", right="no score is above 100 or below 0")
def test_scores_stay_between_0_and_100():
    lines = ["\n".join(WORDS[i : i + 3] * 5) for i in range(6)]
    for metric in (chrf, rouge, exact_match, token_f1, bleu):
        values = [
            value for value in metric(lines, lines[::-1]).values() if not isinstance(value, str)
        ]
        assert all(0 <= value <= 100.0001 for value in values)


@pytest.mark.report(
    "browsermt/students#10", right="an empty text never beats a translation with an error"
)
def test_an_empty_text_is_not_preferred():
    reference = ["do it because I say so"]
    for metric in (bleu, chrf, rouge, token_f1):
        value = lambda text, metric=metric: next(iter(metric([text], reference).values()))
        assert value("do it because I say it") > value("") == 0


@pytest.mark.report(
    "facebookresearch/multiloko#11",
    "huggingface/datasets#4030",
    right="articles are those of the text's language",
    hit='"il a" (he has) equalled "il" (he) in every text',
)
def test_articles_are_those_of_the_language():
    assert exact_match(["il a"], ["il"], articles=("le", "la", "les"))["exact_match"] == 0
    assert (
        exact_match(["la rivière"], ["rivière"], articles=("le", "la", "les"))["exact_match"] == 100
    )
    assert token_f1(["a b"], ["b"], articles=())["token_f1"] == pytest.approx(200 / 3)
    assert exact_match(["The river"], ["a river!"])["exact_match"] == 100  # SQuAD's


@pytest.mark.report(
    "confident-ai/deepeval#3096",
    "confident-ai/deepeval#3164",
    right="two ways to write an accent are one letter",
    hit="an answer with a combining accent was wrong beside the same word",
)
@pytest.mark.parametrize("word", ["café", "Zürich", "감", "naïve"])
def test_accents_are_equal_in_both_forms(word):
    texts = [unicodedata.normalize(form, word) for form in ("NFD", "NFC")]
    assert texts[0] != texts[1]
    for metric in (exact_match, token_f1, rouge):
        assert next(iter(metric([texts[0]], [texts[1]]).values())) == 100
    assert exact_match([texts[0]], [word[:-1]])["exact_match"] == 0


@pytest.mark.report("huggingface/evaluate#256", right="a vowel sign is a part of its word")
def test_marks_stay_with_their_letters():
    assert unicode_words("नदी, के!") == ["नदी", "के"]
    assert unicode_words("co\u00adop it's 3.5") == ["coop", "it", "s", "3", "5"]
    assert unicode_words("川が a_b") == ["川", "が", "a", "b"]
    assert all(text_metrics.unicode_words(text) for text in SENTENCES.values())


# --- what users hand in


@pytest.mark.report(
    "deepset-ai/haystack#2508",
    right="punctuation of any script does not count, as in the script of MLQA",
    hit=(
        "only ASCII's was taken away: a Chinese answer with its full stop was wrong, and so were "
        "curly quotes"
    ),
)
@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("你好。", "你好"),
        ("¿Qué hora es?", "qué hora es"),
        ("“it’s” — here", "its here"),
        ("ماذا؟", "ماذا"),
        ("«Oui»", "oui"),
    ],
)
def test_punctuation_of_every_script_is_none(text, reference):
    assert exact_match([text], [reference])["exact_match"] == 100
    assert token_f1([text], [reference])["token_f1"] == 100
    assert exact_match(["C+ 5°"], ["C 5"])["exact_match"] == 0  # a degree is no punctuation


@pytest.mark.report(
    "mjpost/sacrebleu#220",
    "mjpost/sacrebleu#28",
    right="several references for one text are refused, not misread",
    hit="a TypeError with a traceback from inside of a package, or of `normalize`",
)
@pytest.mark.parametrize("metric", [bleu, chrf, rouge, exact_match, token_f1])
def test_anything_but_texts_is_refused_with_its_number(as_users_call, metric):
    for texts, references, said in (
        (["a", "b"], ["a", ["b", "c"]], "reference 1 is a list, not a text"),
        (["a", None], ["a", "b"], "text 1 is a NoneType, not a text"),
        ([b"a"], ["a"], "text 0 is a bytes, not a text"),
    ):
        with pytest.raises(ConfigError, match=said):
            metric(texts, references)


@pytest.mark.report(
    "microsoft/nni#4286", right="columns of NumPy and iterators are lists of texts, too",
    hit="NumPy's texts ended in a TypeError or in 'the truth value of an array is ambiguous'",
)  # fmt: skip
def test_arrays_of_texts_are_lists_of_texts(as_users_call):
    texts = [" ".join(WORDS[:6]), " ".join(WORDS[6:12])]
    for metric in (bleu, chrf, rouge, exact_match, token_f1):
        assert (
            metric(np.array(texts), np.array(texts))
            == metric(texts, texts)
            == metric(iter(texts), iter(texts))
        )


@pytest.mark.report(
    "ggozad/oterm#189", right="one article in quotes is refused: its letters would be the articles",
    hit="articles='the' took the words t, h and e away, and left 'the'",
)  # fmt: skip
def test_a_text_is_no_list_of_articles():
    assert exact_match(["el gato"], ["gato"], articles=["el"])["exact_match"] == 100
    for metric in (exact_match, token_f1):
        with pytest.raises(ConfigError, match="articles='el': its letters"):
            metric(["el gato"], ["gato"], articles="el")
