"""An exported forward pass: the same numbers in a process that cannot import this package."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.flax

pytest.importorskip("flatbuffers")  # what jax.export writes with

from jaxformer import masks, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.interop import export
from jaxformer.models import Classification, EncoderDecoder, ModelConfig, Patches
from jaxformer.ops.positions import Rope

GPT = ModelConfig(
    vocab_size=13, num_layers=2, d_model=8, num_heads=2, context_length=12, d_ff=12, init_std=0.3
)
LLAMA = replace(
    GPT, positions=Rope(), num_kv_heads=1, masks=(masks.causal() & masks.window(3), masks.causal())
)
BERT = replace(GPT, masks=(masks.full(),))
PAIR = EncoderDecoder(replace(BERT, heads=()), replace(GPT, context_length=9))
VIT = replace(
    GPT,
    vocab_size=0,
    context_length=5,
    embedding=Patches((4, 4), (2, 2), 3),
    masks=(masks.full(),),
    heads=(Classification(3, pooler=None),),
)
CAPTIONS = EncoderDecoder(
    replace(VIT, heads=()), replace(GPT, context_length=9), share_embeddings=False
)
IMAGES = np.random.default_rng(2).normal(size=(3, 4, 4, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def open_sizes():
    """An open batch or length is a symbol, which no annotation `int` takes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def drawn(config, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jnp.asarray(rng.normal(0, 0.3, a.shape), dtype),
        params.abstract(models.spec(config)),
    )


def tokens(*shape):
    return np.random.default_rng(1).integers(0, 13, shape).astype(np.int32)


def load(folder):
    """The forward pass of an exported folder, as the module's docstring reads it."""
    forward = jax.export.deserialize(bytearray((folder / "forward.stablehlo").read_bytes()))
    return partial(forward.call, safetensors.flax.load_file(folder / "model.safetensors"))


def close(a, b):
    """Float32 sums of some ten terms in another order: XLA fuses the exported program by itself."""
    np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-5
    )


ELSEWHERE = """
import sys
sys.modules["jaxformer"] = None  # an import of it fails
import json, pathlib, jax, jax.export, numpy as np, safetensors.numpy
folder = pathlib.Path(sys.argv[1])
forward = jax.export.deserialize(bytearray((folder / "forward.stablehlo").read_bytes()))
weights = safetensors.numpy.load_file(folder / "model.safetensors")
about = json.loads((folder / "config.json").read_text())
results = {}
for batch, length in ((2, 7), (5, 12)):
    tokens = np.random.default_rng(1).integers(0, 13, (batch, length)).astype(np.int32)
    results[f"logits{batch}"] = forward.call(weights, tokens)
    scalar = lambda weights: (forward.call(weights, tokens) ** 2).sum()
    results[f"grad{batch}"] = jax.grad(scalar)(weights)["embedding/tokens"]
assert about["arguments"]["tokens"] == {"shape": ["b", "t"], "dtype": "int32"}, about
np.savez(folder / "results.npz", **results)
"""


@pytest.mark.slow
def test_another_process_without_this_package_has_the_same_logits_and_gradients(tmp_path):
    weights = drawn(LLAMA)
    export.save(tmp_path / "gpt", LLAMA, weights, vjp_order=1)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "gpt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "gpt" / "results.npz")
    for batch, length in ((2, 7), (5, 12)):
        read = jnp.asarray(tokens(batch, length))
        close(results[f"logits{batch}"], models.apply(LLAMA, weights, read).logits)
        gradient = jax.grad(lambda w, read: (models.apply(LLAMA, w, read).logits ** 2).sum())(
            weights, read
        )
        close(results[f"grad{batch}"], gradient["embedding"]["tokens"])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_saved_program_is_a_function_of_tokens(tmp_path, dtype):
    weights = drawn(GPT, dtype)
    export.save(tmp_path / "gpt", GPT, weights)
    forward = load(tmp_path / "gpt")
    for shape in ((1, 1), (3, 5), (2, 12)):
        np.testing.assert_allclose(  # bfloat16 has 8 bits: fused otherwise, a rounding more or less
            np.asarray(forward(tokens(*shape)), np.float32),
            np.asarray(models.apply(GPT, weights, jnp.asarray(tokens(*shape))).logits, np.float32),
            rtol=1e-5 if dtype == jnp.float32 else 0.05,
            atol=1e-5 if dtype == jnp.float32 else 0.05,
        )
    for wrong in (tokens(1, 13), tokens(1, 0), tokens(3), tokens(1, 3).astype(np.float32)):
        with pytest.raises(
            ValueError,
            match=r"refining shapes|shapes do not match|(Rank|Dtype) mismatch for args\[1\]",
        ):
            forward(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["pair", "captions", "vit", "bert", "headless", "long", "performer"]
)
def test_every_kind_of_model(tmp_path, case):
    config, given, options = {
        "pair": (PAIR, (tokens(3, 4), tokens(3, 6)), {}),
        "captions": (CAPTIONS, (tokens(3, 5), IMAGES), {"batch": 3}),
        "vit": (VIT, (IMAGES,), {"batch": 3}),
        "bert": (
            BERT,
            (tokens(3, 6), np.repeat([[1, 1, 1, 2, 2, 0]], 3, 0).astype(np.int32)),
            {"inputs": ("segment_ids",), "length": 6},
        ),
        "headless": (replace(GPT, heads=()), (tokens(3, 4),), {}),
        "long": (replace(GPT, context_length=600), (tokens(2, 600),), {"length": 600, "batch": 2}),
        "performer": (
            replace(GPT, mixer=zoo.Performer(features=8)),
            (tokens(2, 8),),
            {"length": 8},
        ),
    }[case]
    weights = drawn(config)
    export.save(tmp_path / "model", config, weights, **options)
    names = {"pair": ("source",), "captions": ("source",), "bert": ("segment_ids",)}.get(case, ())
    rest = dict(zip(names, map(jnp.asarray, given[1:]), strict=True))
    output = models.apply(config, weights, jnp.asarray(given[0]), **rest)
    close(
        load(tmp_path / "model")(*given), output.hidden if output.logits is None else output.logits
    )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["platforms"] == [
        "cpu",
        "tpu",
        "cuda",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inputs": ("mask",)}, "segment_ids"),
        ({"platforms": ("gpu",)}, "cuda"),
        ({"batch": 0}, "batch=0, length=None: must be at least 1"),
        ({"length": 0}, "batch=None, length=0: must be at least 1"),
        ({"length": -2, "batch": 2}, "must be at least 1"),
    ],
)
def test_mistakes_are_answered_at_the_door(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        export.save(tmp_path / "gpt", GPT, drawn(GPT), **options)
    assert not (tmp_path / "gpt").exists()


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (GPT, {"tokens": ("b", "t")}),
        (PAIR, {"tokens": ("b", "t"), "source": ("b", "s")}),
        (VIT, {"images": ("b", 4, 4, 3)}),
        (CAPTIONS, {"tokens": ("b", "t"), "source": ("b", 4, 4, 3)}),
    ],
)
def test_each_stack_takes_what_its_embedding_reads(tmp_path, config, arguments):
    found = export._arguments(config, None, None, (), np.float32)
    shapes = {
        name: tuple(size if isinstance(size, int) else str(size) for size in a.shape)
        for name, a in found.items()
    }
    assert shapes == arguments and all(
        (a.dtype == np.int32) == (a.ndim == 2) for a in found.values()
    )
    if ("b", 4, 4, 3) in arguments.values():  # patches are no text: none of them is padding
        with pytest.raises(ConfigError, match="source_segment_ids"):
            export.save(tmp_path / "model", config, drawn(config), inputs=("source_segment_ids",))


@pytest.mark.thorough
def test_the_arguments_are_listed_in_the_order_of_the_call(tmp_path):
    """Of a mapping in JSON the order is lost: `source` came before `tokens`."""
    order = ("segment_ids", "positions", "source_segment_ids")
    export.save(
        tmp_path / "pair", PAIR, drawn(PAIR), platforms=("cpu",), batch=2, length=3, inputs=order
    )
    about = json.loads((tmp_path / "pair" / "config.json").read_text())
    assert about["order"] == ["params", "tokens", "source", *order] and set(about["order"]) == set(
        about["arguments"]
    )


def test_what_does_not_belong_together_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not those of the config: embedding/tokens"):
        export.save(tmp_path / "gpt", replace(GPT, vocab_size=14), drawn(GPT))
    export.save(tmp_path / "tpu", GPT, drawn(GPT), batch=1, length=2, platforms=("tpu",))
    with pytest.raises(ValueError, match=r"exported for platforms.*tpu"):
        load(tmp_path / "tpu")(tokens(1, 2))
