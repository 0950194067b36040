"""What a run says before it wastes hours, and what it does not bother anybody with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.quickstart import experiment as quickstart
from jaxformer.runs import first_warnings
from jaxformer.zoo import PRESETS

GPT2 = replace(quickstart, model=PRESETS["gpt2_small"], batch_size=8, steps=1000)


def with_vocabulary(size):
    return replace(quickstart, model=replace(quickstart.model, vocab_size=size))


@pytest.mark.parametrize(
    ("size", "known", "said"),
    [
        (50304, 2000, "48,304 of 50,304 rows have no token"),
        (50304, 50257, None),  # padded to a multiple of 128
        (257, 256, None),  # a token that hides others
        (512, 300, None),
        (256, None, None),  # images
        (100, 200, None),  # too small, which another check refuses
    ],
)
def test_rows_without_a_token_are_counted(size, known, said):
    lines = first_warnings.rows_without_token(
        with_vocabulary(size), SimpleNamespace(vocab_size=known)
    )
    assert bool(lines) == (said is not None)
    if said:
        assert said in lines[0] and "--model.vocab-size=2048" in lines[0]


def text_of(validation, fraction, own=None):
    """(data, data set) of a text of 200,000 tokens, of which some are held out."""
    data = SimpleNamespace(validation_fraction=fraction, validation=own)
    split = lambda size: SimpleNamespace(tokens=range(size))
    dataset = SimpleNamespace(train=split(200_000 - validation), validation=split(validation))
    return data, dataset


def test_a_small_validation_split_is_named():
    """A folder of texts and the default of Corpus held 97 tokens out."""
    (line,) = first_warnings.small_validation(*text_of(100, 0.0005))
    assert "100 tokens" in line and "0.20 nats" in line
    assert "--data.validation-fraction=0.1 holds out 20,000" in line
    for few in (text_of(100, 0.1), text_of(100, 0.0005, own="val.txt"), text_of(6000, 0.03)):
        assert first_warnings.small_validation(*few) == []  # no advice, or no need


def test_a_split_without_tokens_is_not_judged():
    images = SimpleNamespace(train=range(10), validation=range(2))
    assert first_warnings.small_validation(SimpleNamespace(), images) == []


def test_a_large_model_on_a_cpu_is_told_its_time(monkeypatch):
    """6 N FLOPs a token: 124M weights, 8 x 1,024 tokens and attention are 7 TFLOP."""
    monkeypatch.setattr(first_warnings, "product_rate", lambda: 1e11)
    (line,) = first_warnings.slow_steps(GPT2)
    assert "TFLOP and takes about 7" in line and "all 1,000 steps 1" in line and "hours" in line
    monkeypatch.setattr(first_warnings, "product_rate", lambda: 1e13)
    assert first_warnings.slow_steps(GPT2) == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(40.0, "40 s"), (720.0, "12 min"), (19800.0, "5.5 hours"), (276480.0, "3.2 days")],
)
def test_a_time_has_a_unit_that_fits(seconds, said):
    assert first_warnings.duration(seconds) == said


def test_a_small_one_is_not_measured(monkeypatch):
    monkeypatch.setattr(first_warnings, "product_rate", lambda: 1 / 0)
    assert first_warnings.slow_steps(quickstart) == []


def test_the_rate_is_that_of_the_faster_product(monkeypatch):
    """2 n^3 FLOPs; the clock here says that the two products take 4 and 2 seconds."""
    clock = iter((0.0, 4.0, 10.0, 12.0))
    monkeypatch.setattr(first_warnings.time, "perf_counter", lambda: next(clock))
    assert first_warnings.product_rate(8) == 2 * 8**3 / 2.0
