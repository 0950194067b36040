"""Published systems: their sizes by somebody else's count, and that a config survives JSON and the
command line."""

import itertools
import json

import jax
import pytest

from jaxformer import cli, config, models, params
from jaxformer.zoo import PRESETS
from tests.witnesses import load

COUNTS = {name: int(count) for name, count in load("parameter_counts").items()}
COUNTS |= {name: int(count) for name, count in load("vision_counts").items()}
# nobody else's class: Linformer adds E and F [512, 256] a layer to RoBERTa's base, Performer
# nothing to BERT's
COUNTS["linformer_base"] = COUNTS["roberta_base"] + 12 * 2 * 512 * 256
COUNTS["performer_base"] = COUNTS["bert_base_encoder"]
# the biases that choose experts are variables here, and buffers there
COUNTS["deepseek_v3"] += 58 * 256
# nor is one of PaLM: maps of queries, of one head of keys and values, and of the output; 12 D^2 of
# the feed-forward; scales of norms
for _name, (_layers, _width, _heads) in {
    "palm_8b": (32, 4096, 16),
    "palm_62b": (64, 8192, 32),
    "palm_540b": (118, 18_432, 48),
}.items():
    _attention = 2 * _width * _heads * 256 + 2 * _width * 256
    _layer = _attention + 12 * _width**2 + _width
    COUNTS[_name] = 256_000 * _width + _layers * _layer + _width
# nor one of Chinchilla and Gopher: tests/zoo/test_transformer_xl.py compares the count with 50
# published ones
for _name, _width in {"chinchilla_70b": 8192, "gopher_280b": 16_384}.items():
    COUNTS[_name] = 32_000 * _width + 80 * (13 * _width**2 + 10 * _width) + _width


@pytest.mark.thorough_after(43)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_published_parameter_counts(name):
    abstract = params.abstract(models.spec(PRESETS[name]))
    assert params.count(abstract) == COUNTS[name]
    # nothing is allocated
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(abstract))


def test_closed_forms():
    """What the counts follow from: GPT-2, LLaMA and the pair of 2017."""
    layer = lambda d: 12 * d**2 + 13 * d
    gpt2 = lambda V, T, L, d: V * d + T * d + L * layer(d) + 2 * d
    assert COUNTS["gpt2_small"] == gpt2(50257, 1024, 12, 768) and COUNTS["gpt3_175b"] == gpt2(
        50257, 2048, 96, 12288
    )
    llama = lambda V, L, d, f, share: (
        2 * V * d + L * (2 * d**2 + 2 * d**2 // share + 3 * d * f + 2 * d) + d
    )
    assert COUNTS["llama_7b"] == llama(32000, 32, 4096, 11008, 1)
    assert COUNTS["llama2_70b"] == llama(32000, 80, 8192, 28672, 8)
    attention, feed = (lambda d: 4 * (d**2 + d)), (lambda d, f: 2 * d * f + f + d)
    pair = lambda V, d, f: (
        V * d
        + 6 * (attention(d) + feed(d, f) + 4 * d)
        + 6 * (2 * attention(d) + feed(d, f) + 6 * d)
    )
    assert COUNTS["transformer_big"] == pair(37000, 1024, 4096)
    # table 1 of the paper, in billions
    papers = {"palm_8b": 8.63, "palm_62b": 62.50, "palm_540b": 540.35}
    assert round(COUNTS["chinchilla_70b"] / 1e9) == 70 and round(COUNTS["gopher_280b"] / 1e9) == 280
    assert all(abs(COUNTS[name] / 1e9 - count) < 0.01 for name, count in papers.items())


def test_descriptions_tell_presets_apart():
    told = {name: json.dumps(config.describe(preset)) for name, preset in PRESETS.items()}
    for one, other in itertools.combinations(PRESETS, 2):
        assert (told[one] == told[other]) == (PRESETS[one] == PRESETS[other]), (one, other)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "name", ["gpt3_175b", "t5_11b", "vit_base", "mixtral_8x7b", "reformer_enwik8", "bert_large"]
)
def test_show_prints_a_table_of_any_preset(name, capsys):
    assert cli.main(["show", name]) == 0
    printed = capsys.readouterr().out
    assert f"{COUNTS[name]:,}" in printed.splitlines()[-1] and "FLOPs a trained token" in printed
    for path in params.paths(models.spec(PRESETS[name])):
        assert path in printed
