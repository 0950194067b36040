"""StableHLO and Flax: what users of exporters and of Flax reported, tried on ours."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.export
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.flax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytest.importorskip("flatbuffers")  # what jax.export writes with

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.interop import export, flax as bridge
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import NTK, Rope

GPT = ModelConfig(
    vocab_size=16, num_layers=1, d_model=8, num_heads=2, context_length=32, init_std=0.3
)


def drawn(config):
    """Parameters of random numbers of NumPy: nothing is compiled."""
    generator = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.5 * generator.normal(size=leaf.shape), jnp.float32)
    return jax.tree.map(draw, models.spec(config))


def tokens(rows, length):
    return jnp.asarray(np.random.default_rng(1).integers(0, 16, (rows, length)), jnp.int32)


def program(folder, config, params, **options):
    """The exported program as a function of its arguments but the parameters."""
    export.save(folder, config, params, platforms=("cpu",), **options)
    forward = jax.export.deserialize(bytearray((folder / export.PROGRAM).read_bytes()))
    leaves = safetensors.flax.load_file(folder / "model.safetensors")
    return lambda *arguments: np.asarray(forward.call(leaves, *arguments))


@pytest.fixture(scope="module", autouse=True)
def open_sizes():
    """An open batch or length is a symbol, which no annotation `int` takes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(config, parameters, program) of a model with dropout; the program reads segments, of any
    batch and length."""
    config = replace(GPT, dropout_rate=0.5, attention_dropout_rate=0.5, positions=Rope())
    params = drawn(config)
    return (
        config,
        params,
        program(tmp_path_factory.mktemp("program") / "a", config, params, inputs=("segment_ids",)),
    )


def close(one, other):
    # float32, other fusions
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#103681",
    "pytorch/pytorch#24824",
    right=(
        "an exported model has no dropout: two calls are equal, and equal the model without a key"
    ),
)
@pytest.mark.report(
    "pytorch/pytorch#110347", "pytorch/pytorch#122321",
    right="any batch and length run, not those of the export alone",
)  # fmt: skip
@pytest.mark.report(
    "huggingface/transformers#3150", "huggingface/transformers#278",
    right="what stands at padded places changes no other place of the exported model",
)  # fmt: skip
def test_an_exported_model_is_the_model(exported):
    config, params, forward = exported
    for rows, length in ((1, 4), (3, 9)):
        text = tokens(rows, length)
        segments = jnp.ones_like(text).at[:, length - 2 :].set(0)
        found = forward(text, segments)
        assert found.shape == (rows, length, 16)
        close(found, models.apply(config, params, text, segment_ids=segments).logits)
        other = jnp.where(segments == 0, (text + 3) % 16, text)
        assert np.array_equal(forward(other, segments)[:, : length - 2], found[:, : length - 2])
        assert np.array_equal(forward(text, segments), found)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#140011",
    right="a length beyond the context is refused when the program is called, not computed",
)  # fmt: skip
def test_a_length_beyond_the_context_is_refused(exported):
    _, _, forward = exported
    with pytest.raises(Exception, match=r"(?i)shape"):
        forward(tokens(1, 33), jnp.ones((1, 33), jnp.int32))


@pytest.mark.report(
    "jax-ml/jax#40486", listed="second 18",
    right="a process without this package computes the same numbers from the folder",
)  # fmt: skip
@pytest.mark.thorough
def test_a_fresh_process_runs_the_program(tmp_path):
    params = drawn(GPT)
    export.save(tmp_path / "a", GPT, params, platforms=("cpu",))
    text = tokens(2, 5)
    np.save(tmp_path / "text.npy", np.asarray(text))
    code = (
        "import jax, jax.export, numpy, pathlib, safetensors.flax, sys\n"
        "program = pathlib.Path('a/forward.stablehlo').read_bytes()\n"
        "forward = jax.export.deserialize(bytearray(program))\n"
        "leaves = safetensors.flax.load_file('a/model.safetensors')\n"
        "numpy.save('out.npy', forward.call(leaves, numpy.load('text.npy')))\n"
        "assert 'jaxformer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    close(np.load(tmp_path / "out.npy"), models.apply(GPT, params, text).logits)


@pytest.mark.report(
    "vllm-project/vllm#5093",
    right=(
        "a rotation that depends on the length follows that of each call, in the exported "
        "program too"
    ),
)
@pytest.mark.thorough
def test_a_rotation_follows_the_length_of_the_call(tmp_path):
    config = replace(GPT, positions=Rope(scaling=NTK(4.0, 8)))
    params = drawn(config)
    forward = program(tmp_path / "a", config, params)
    plain = replace(config, positions=Rope())
    for length, scaled in ((8, False), (24, True)):
        text = tokens(1, length)
        found = forward(text)
        close(found, models.apply(config, params, text).logits)
        assert np.allclose(found, models.apply(plain, params, text).logits, atol=1e-5) != scaled


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#21203",
    "tenstorrent/tt-xla#5177",
    right=(
        "parameters that are split over devices are exported whole, and the program runs on one "
        "device"
    ),
)
def test_split_parameters_are_exported_whole(tmp_path):
    params = drawn(GPT)
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    split = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    split["embedding"]["tokens"] = jax.device_put(
        params["embedding"]["tokens"], NamedSharding(mesh, PartitionSpec("d"))
    )
    export.save(tmp_path / "a", GPT, split, platforms=("cpu",), batch=1, length=4)
    forward = jax.export.deserialize(bytearray((tmp_path / "a" / export.PROGRAM).read_bytes()))
    leaves = safetensors.flax.load_file(tmp_path / "a" / "model.safetensors")
    assert forward.nr_devices == 1
    assert np.array_equal(leaves["embedding/tokens"], params["embedding"]["tokens"])
    close(forward.call(leaves, tokens(1, 4)), models.apply(GPT, params, tokens(1, 4)).logits)


@pytest.mark.report(
    "mflux-community/mflux#603",
    right=(
        "a save that is cut off leaves no folder that looks complete: the program is there, or "
        "nothing is"
    ),
    hit="the folder appeared with its weights before the program was written",
)
def test_a_cut_save_leaves_nothing(tmp_path, monkeypatch):
    written = type(tmp_path).write_bytes

    def full(path, contents):
        if path.name == export.PROGRAM:
            raise OSError(28, "No space left on device")
        return written(path, contents)

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    with pytest.raises((ConfigError, OSError), match="No space"):
        export.save(tmp_path / "a", GPT, drawn(GPT), platforms=("cpu",), batch=1, length=4)
    assert list(tmp_path.iterdir()) == []


# Flax


@pytest.mark.report(
    "google/flax#3945", "google/flax#3086", "huggingface/transformers#12534",
    right="param_dtype is the dtype of all parameters that a Linen module makes",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_have_the_dtype_that_is_asked_for(dtype):
    module = bridge.as_linen(GPT, param_dtype=dtype)
    shapes = jax.eval_shape(lambda key: module.init(key, tokens(1, 4)), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(dtype)}


class Kept(nnx.Module):
    """Ones where dropout keeps a feature, zeros elsewhere."""

    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.sign(self.dropout(jnp.ones_like(x)))


@pytest.mark.thorough
@pytest.mark.report(
    "google/flax#4950",
    "google/flax#4589",
    right=(
        "a Flax layer's dropout differs from layer to layer of a scanned stack, and is off "
        "without a key"
    ),
)
def test_dropout_of_flax_layers_differs_between_layers():
    masks = []

    def watch(module, x, context):
        kept = module(x)
        jax.debug.callback(lambda array: masks.append(np.asarray(array)), kept)
        return kept

    config = replace(
        GPT, num_layers=3, feedforward=bridge.FlaxFeedForward(lambda rngs: Kept(rngs), watch)
    )
    params = drawn(config)
    models.apply(
        config, params, tokens(1, 6), dropout_key=jax.random.key(3)
    ).logits.block_until_ready()
    jax.effects_barrier()
    assert len(masks) == 3
    assert all(0.2 < mask.mean() < 0.8 for mask in masks)
    assert not any(np.array_equal(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


class Twice(nnx.Module):
    """One linear map, used two times."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(self.first(x))


@pytest.mark.report(
    "google/flax#3516",
    "mlverse/torch#305",
    right=(
        "a parameter that a Flax layer uses twice is one parameter, with the sum of both gradients"
    ),
)
def test_a_shared_parameter_is_one_parameter():
    config = replace(GPT, feedforward=bridge.FlaxFeedForward(lambda rngs: Twice(rngs)))
    made = config.feedforward(config)
    (kernel,) = jax.tree.leaves(drawn_of(made.spec))
    assert kernel.shape == (8, 8)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, 8)), jnp.float32)
    context = bridge._context(tokens(1, 3), None)
    tree = jax.tree.map(lambda leaf: kernel, made.spec)
    gradient = jax.grad(lambda tree: made.apply(tree, x, context).out.sum())(tree)
    expected = jax.grad(lambda kernel: (x @ kernel @ kernel).sum())(kernel)
    close(jax.tree.leaves(gradient)[0], expected)


def drawn_of(spec):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), spec
    )


@pytest.mark.thorough
@pytest.mark.report(
    "google-deepmind/optax#290",
    right=(
        "a filter of NNX finds the parameters of a model: what it leaves out does not move in a "
        "step"
    ),
)
def test_a_step_of_nnx_moves_what_its_filter_finds():
    import optax

    model = bridge.as_nnx(GPT, jax.tree.map(jnp.asarray, drawn(GPT)))
    norms = nnx.All(nnx.Param, nnx.PathContains("final_norm"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=norms)
    before = jax.tree.map(np.asarray, bridge.params_of(model))

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: (model(tokens(1, 4)).logits ** 2).mean()
        optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, norms))(model))

    step(model, optimizer)
    after = bridge.params_of(model)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert any(jax.tree.leaves(moved["final_norm"]))
    assert not any(
        jax.tree.leaves({name: part for name, part in moved.items() if name != "final_norm"})
    )
