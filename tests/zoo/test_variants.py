"""Variants of attention against other people's layers and models, against their definitions, and as
models of ours."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.layer import Context
from jaxformer.models.mixers import attention
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope
from tests.witnesses import load, variants_hf, variants_x

# transformers takes norms, angles and the softmax in float32, whatever the model is.
HF = dict(rtol=2e-5, atol=2e-5)
# x-transformers' softmax is float32, the rest float64: outputs are sums of some weights of 1e-7
# relative each.
X = dict(rtol=1e-6, atol=1e-6)
# float64 on both sides, numbers of order one.
FLOAT64 = dict(rtol=1e-11, atol=1e-11)

# These functions are compiled for much longer than they run: half as long this way.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def llama4(config):
    """Llama 4's layers: temperature where nothing turns."""
    if config.positions is not None:
        return attention(config)
    return zoo.temperature.temperature(
        config, floor_scale=variants_hf.FLOOR_SCALE, attn_scale=variants_hf.ATTN_SCALE
    )


def normed_and_gated(config):
    """Qwen3-Next's attention: two variants in one mixer, as the module says."""
    extra = zoo.qk_norm.qk_norm(config).spec | zoo.gated.gated(config).spec
    return attention(
        config, extra=extra, prepare=partial(zoo.qk_norm.normalize, config), finish=zoo.gated.gate
    )


# transformers: whole models, and single layers where the model around them is not one of ours


def hf_config(name, **changes):
    m = variants_hf
    config = ModelConfig(
        vocab_size=m.V,
        num_layers=m.LAYERS.get(name, 1),
        d_model=m.D,
        num_heads=m.N,
        num_kv_heads=m.K,
        head_width=m.H,
        d_ff=m.F,
        context_length=32,
        feedforward="swiglu",
        norm="rms_norm",
        norm_eps=m.EPS,
        positions=Rope(m.BASE),
        use_bias=False,
        tie_embeddings=False,
    )
    return replace(config, **changes)


def weights_of(arrays, name):
    prefix = f"{name}/weights/"
    return {
        key.removeprefix(prefix): x.astype(np.float64)
        for key, x in arrays.items()
        if key.startswith(prefix)
    }


def heads(kernel, count):
    """torch's [..., count H, D] -> [..., D, count, H]."""
    return np.moveaxis(kernel.reshape(*kernel.shape[:-2], count, -1, kernel.shape[-1]), -1, -3)


def projections(w, prefix, names, config):
    """The four projections of attention, from torch's layouts."""
    N, K = config.num_heads, config.kv_heads
    query, key, value = (
        heads(w[f"{prefix}{name}.weight"], n) for name, n in zip(names[:3], (N, K, K), strict=True)
    )
    out = w[f"{prefix}{names[3]}.weight"]
    out = np.moveaxis(out, -1, -2).reshape(*out.shape[:-2], N, -1, out.shape[-2])
    return {
        name: {"kernel": kernel}
        for name, kernel in zip(
            ("query", "key", "value", "out"), (query, key, value, out), strict=True
        )
    }


HF_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def hf_extra(w, prefix, scale):
    """What the variants have beside their projections."""
    if f"{prefix}q_norm.weight" in w:
        return {
            f"{long}_norm": {"scale": scale(w[f"{prefix}{short}_norm.weight"])}
            for long, short in (("query", "q"), ("key", "k"))
        }
    if f"{prefix}lambda_q1" in w:
        pair = lambda kind: np.stack(
            [w[f"{prefix}lambda_{kind}1"], w[f"{prefix}lambda_{kind}2"]], axis=1
        )
        # DiffLlama's norm has no scale
        ones = np.ones((variants_hf.LAYERS["diffllama"], 2 * variants_hf.H))
        return {"lambda_query": pair("q"), "lambda_key": pair("k"), "pair_norm": {"scale": ones}}
    return {}


def hf_params(w, config):
    layer = "model.layers."
    mlp = "mlp" if f"{layer}mlp.up_proj.weight" in w else "feed_forward"
    matrix = lambda name: {"kernel": np.swapaxes(w[f"{layer}{mlp}.{name}_proj.weight"], -1, -2)}
    return {
        "embedding": {"tokens": w["model.embed_tokens.weight"]},
        "layers": {
            "attention_norm": {"scale": w[f"{layer}input_layernorm.weight"]},
            "attention": projections(w, f"{layer}self_attn.", HF_NAMES, config)
            | hf_extra(w, f"{layer}self_attn.", lambda x: x),
            "feedforward_norm": {"scale": w[f"{layer}post_attention_layernorm.weight"]},
            "feedforward": {name: matrix(name) for name in ("up", "gate", "down")},
        },
        "final_norm": {"scale": w["model.norm.weight"]},
        "heads": {"language_model": {"kernel": w["lm_head.weight"]}},
    }


HF_MODELS = {
    "qwen3": dict(mixer=zoo.qk_norm.qk_norm),
    "diffllama": dict(mixer=zoo.differential.differential),
    "smollm3": dict(positions=(Rope(variants_hf.BASE), None)),  # NoPE by layer
    "llama4": dict(
        mixer=llama4,
        positions=(Rope(variants_hf.BASE, layout="interleaved"), None),
        masks=(masks.causal() & masks.chunked(variants_hf.CHUNK), masks.causal()),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HF_MODELS)
def test_models_of_transformers(name):
    config = hf_config(name, **HF_MODELS[name])
    arrays = load("variants_hf")
    with jax.enable_x64(True):
        ours = hf_params(weights_of(arrays, name), config)
        assert jax.tree.map(np.shape, ours) == jax.tree.map(
            lambda leaf: leaf.shape, models.spec(config)
        )
        logits = jit(models.apply, static_argnums=0)(config, ours, arrays["tokens"]).logits
        np.testing.assert_allclose(logits, arrays[f"{name}/logits"], **HF)


def layer_out(config, ours, x, layer=0, carry=None):
    """One mixer on its own, in float64."""

    @jit
    def run(ours, x, carry):
        context = Context(masks.causal(), jnp.arange(x.shape[1])[None], layer=layer, carry=carry)
        mixed = layout.kinds(config)[0].mixer.apply(ours, x, context)
        return mixed.out, mixed.carry

    return run(
        jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), ours),
        jnp.asarray(x, jnp.float64),
        carry,
    )


def test_attention_of_olmo2():
    config = hf_config("olmo2", mixer=zoo.qk_norm.qk_norm_full)
    arrays = load("variants_hf")
    with jax.enable_x64(True):
        w = weights_of(arrays, "olmo2")
        extra = hf_extra(w, "", lambda x: x.reshape(-1, variants_hf.H))
        out, _ = layer_out(config, projections(w, "", HF_NAMES, config) | extra, arrays["x"])
        np.testing.assert_allclose(out, arrays["olmo2/out"], **HF)


def test_attention_of_qwen3_next():
    """Its queries and gates are one matrix, side by side in each head; its norms' scales are stored
    less one."""
    config = hf_config(
        "qwen3_next", mixer=normed_and_gated, positions=Rope(variants_hf.BASE, fraction=0.5)
    )
    arrays = load("variants_hf")
    with jax.enable_x64(True):
        w = weights_of(arrays, "qwen3_next")
        both = w["q_proj.weight"].reshape(variants_hf.N, 2, variants_hf.H, variants_hf.D)
        w["q_proj.weight"], gate = (both[:, i].reshape(-1, variants_hf.D) for i in range(2))
        ours = projections(w, "", HF_NAMES, config) | {
            "gate": {"kernel": heads(gate, variants_hf.N)}
        }
        out, _ = layer_out(config, ours | hf_extra(w, "", lambda x: 1 + x), arrays["x"])
        np.testing.assert_allclose(out, arrays["qwen3_next/out"], **HF)


# x-transformers: single layers

X_CONFIG = ModelConfig(
    vocab_size=5,
    num_layers=2,
    d_model=variants_x.D,
    num_heads=variants_x.N,
    head_width=variants_x.H,
    context_length=variants_x.T,
    positions=None,
    use_bias=False,
)


def x_extra(name, w):
    match name:
        case "gated":
            return {"gate": {"kernel": heads(w["to_v_gate.weight"], variants_x.N)}}
        case "residual_first":
            return {"value_mix": np.full(2, np.nan)}
        case "residual_second":
            own = 1 / (1 + np.exp(-w["to_value_residual_mix.0.bias"][0]))
            return {"value_mix": np.array([1 - own, own])}
    return {}


X_LAYERS: dict[str, Any] = {
    "gated": (zoo.gated.gated, X),
    "sigmoid": (partial(zoo.sigmoid.sigmoid, bias=0.0), FLOAT64),  # no softmax at all
}


def x_layer(name, mixer, **options):
    arrays = load("variants_x")
    w, config = weights_of(arrays, name), replace(X_CONFIG, mixer=mixer)
    ours = projections(w, "", ("to_q", "to_k", "to_v", "to_out"), config) | x_extra(name, w)
    return (*layer_out(config, ours, arrays["x"], **options), arrays[f"{name}/out"])


@pytest.mark.parametrize("name", X_LAYERS)
def test_layers_of_x_transformers(name):
    mixer, tolerance = X_LAYERS[name]
    with jax.enable_x64(True):
        out, _, expected = x_layer(name, mixer)
        np.testing.assert_allclose(out, expected, **tolerance)


def test_value_residual_of_x_transformers():
    """The first layer's values reach the second; the first layer's own numbers are not used (they
    are NaN here)."""
    with jax.enable_x64(True):
        nothing = {"value": jnp.zeros((2, variants_x.T, variants_x.N, variants_x.H))}
        out, carry, expected = x_layer(
            "residual_first", zoo.value_residual.value_residual, layer=0, carry=nothing
        )
        np.testing.assert_allclose(out, expected, **X)
        out, _, expected = x_layer(
            "residual_second", zoo.value_residual.value_residual, layer=1, carry=carry
        )
        np.testing.assert_allclose(out, expected, **X)


# Definitions, where nobody else's code is the paper's: NumPy, one query at a time.

N, K, H, D = 4, 2, 3, 8
PLAIN = ModelConfig(
    vocab_size=5,
    num_layers=2,
    d_model=D,
    num_heads=N,
    num_kv_heads=K,
    head_width=H,
    context_length=16,
    positions=None,
)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def defined(p, x, weigh=softmax, values=None):
    """Causal attention: weigh(scores [N, seen]) -> weights, values(the layer's own) -> those it
    uses."""
    project = lambda name: np.einsum("btd,dnh->btnh", x, p[name]["kernel"]) + p[name]["bias"]
    query, key = project("query"), project("key").repeat(N // K, axis=2)
    value = (project("value") if values is None else values(project("value"))).repeat(
        N // K, axis=2
    )
    out = np.zeros(x.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        scores = np.einsum("nh,snh->ns", query[b, t], key[b, : t + 1]) / np.sqrt(H)
        weights = weigh(scores)
        mixed = np.stack([weights[n] @ value[b, : t + 1, n] for n in range(N)])
        out[b, t] = np.einsum("nh,nhd->d", mixed, p["out"]["kernel"]) + p["out"]["bias"]
    return out


def drawn(spec, seed=0):
    """Numbers for a tree of Specs: matrices that keep norms, scales around one, nothing at its
    initial value."""
    rng = np.random.default_rng(seed)

    def leaf(path, spec):
        name = jax.tree_util.keystr(path)
        wide = np.prod(
            [n for n, axis in zip(spec.shape, spec.axes, strict=True) if axis in spec.contracts]
        )
        return rng.normal(size=spec.shape) * (1.0 if wide > 1 else 0.4) / np.sqrt(wide) + (
            "scale" in name
        )

    return jax.tree_util.tree_map_with_path(leaf, spec)


def test_sigmoid_attention_as_defined():
    """The default bias is -log of the context length."""
    with jax.enable_x64(True):
        config = replace(PLAIN, mixer=zoo.sigmoid.sigmoid)
        p, x = (
            drawn(zoo.sigmoid.sigmoid(config).spec),
            np.random.default_rng(1).normal(size=(2, 5, D)),
        )
        expected = defined(p, x, lambda scores: 1 / (1 + np.exp(-(scores - np.log(16)))))
        np.testing.assert_allclose(layer_out(config, p, x)[0], expected, **FLOAT64)


def test_value_residual_as_defined():
    """Two numbers a layer that need not sum to one."""
    with jax.enable_x64(True):
        config = replace(PLAIN, mixer=zoo.value_residual.value_residual)
        rng = np.random.default_rng(1)
        p, x, first = (
            drawn(zoo.value_residual.value_residual(config).spec),
            rng.normal(size=(2, 5, D)),
            rng.normal(size=(2, 5, K, H)),
        )
        a, b = p["value_mix"]
        expected = defined(p, x, values=lambda value: a * first + b * value)
        out, _ = layer_out(config, p, x, layer=1, carry={"value": jnp.asarray(first)})
        np.testing.assert_allclose(out, expected, **FLOAT64)


def test_differential_attention_as_defined():
    """With a scale in its norm, which the paper's code has and DiffLlama does not."""
    with jax.enable_x64(True):
        config = replace(PLAIN, mixer=zoo.differential.differential, norm_eps=1e-2)
        p, x = (
            drawn(zoo.differential.differential(config).spec),
            np.random.default_rng(1).normal(size=(2, 5, D)),
        )
        project = lambda name: np.einsum("btd,dnh->btnh", x, p[name]["kernel"]) + p[name]["bias"]
        query, key, value = (project(name) for name in ("query", "key", "value"))
        start = 0.8 - 0.6 * np.exp(-0.3 * 5)  # layer 5
        plus, minus = np.exp(np.einsum("ih,ih->i", p["lambda_query"], p["lambda_key"]))
        expected = np.zeros((2, 5, D))
        for b, t, n in np.ndindex(2, 5, N // 2):
            A = [
                softmax(key[b, : t + 1, m // (N // K)] @ query[b, t, m] / np.sqrt(H))
                for m in (n, n + N // 2)
            ]
            k = n // (N // K)
            V = np.concatenate([value[b, : t + 1, k], value[b, : t + 1, k + K // 2]], axis=-1)
            y = (A[0] - (plus - minus + start) * A[1]) @ V
            y = (1 - start) * y / np.sqrt((y**2).mean() + 1e-2) * p["pair_norm"]["scale"]
            expected[b, t] += y @ p["out"]["kernel"].reshape(N // 2, 2 * H, D)[n]
        expected += p["out"]["bias"]
        np.testing.assert_allclose(layer_out(config, p, x, layer=5)[0], expected, **FLOAT64)


# All of them as models

V, T = 13, 8
MODEL = ModelConfig(
    vocab_size=V,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    context_length=16,
    positions=Rope(),
    feedforward="relu",
    d_ff=16,
    norm="rms_norm",
    use_bias=False,
)
MIXERS = {
    "qk_norm": zoo.qk_norm.qk_norm,
    "qk_norm_full": zoo.qk_norm.qk_norm_full,
    "qk_model_norm": zoo.qk_norm.qk_model_norm,
    "gated": zoo.gated.gated,
    "differential": zoo.differential.differential,
    "sigmoid": partial(zoo.sigmoid.sigmoid, bias=-1.0),
    "value_residual": zoo.value_residual.value_residual,
    "temperature": partial(zoo.temperature.temperature, floor_scale=2, attn_scale=0.5),
    "inverse_depth_scale": zoo.temperature.inverse_depth_scale,
}
# layers that know their number; of the others one is as good as two
DEEP = (
    "differential",
    "value_residual",
    "inverse_depth_scale",
)
CONFIGS = {
    name: replace(MODEL, mixer=mixer, num_layers=1 + (name in DEEP))
    for name, mixer in MIXERS.items()
}
TOKENS = np.random.default_rng(0).integers(0, V, (2, T)).astype(np.int32)


@partial(jit, static_argnums=0)
def logits_of(config, p, tokens, segment_ids):
    return models.apply(config, p, tokens, segment_ids=segment_ids).logits


def made(name):
    config = CONFIGS[name]
    return config, jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), drawn(models.spec(config)))


def close(a, b, tolerance=5e-6):
    # float32 sums in another order: some 1e-7 relative, two layers deep
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * float(np.abs(np.asarray(b)).max())
    )


# one of these two of each variant is fast
halves = [
    [pytest.param(n, marks=() if i % 2 == k else pytest.mark.slow) for i, n in enumerate(MIXERS)]
    for k in (0, 1)
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", halves[0])
def test_causal_packed_and_decoded(name):
    """Token k changes nothing before it; packed rows equal separate ones; cached pieces equal the
    forward pass."""
    config, p = made(name)
    ones = np.ones_like(TOKENS)
    logits = np.asarray(logits_of(config, p, TOKENS, ones))
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % V
    other = np.asarray(logits_of(config, p, changed, ones))
    close(other[:, :5], logits[:, :5])
    assert np.abs(other[:, 5:] - logits[:, 5:]).max() > 1e-3

    packed = np.asarray(logits_of(config, p, TOKENS, np.array([[1] * 3 + [2] * 5] * 2)))
    second = np.asarray(logits_of(config, p, np.roll(TOKENS, -3, axis=1), ones))
    close(packed[:, :3], logits[:, :3])
    close(packed[:, 3:], second[:, :5])

    # more room than tokens: empty slots must stay unseen
    cache = decoding.init_cache(config, 2, T + 3)
    step = jit(partial(models.apply, config))
    for start in range(0, T, 2):
        out = step(p, TOKENS[:, start : start + 2], cache=cache)
        close(out.logits, logits[:, start : start + 2], 1e-5)
        cache = out.cache


@pytest.mark.thorough
@pytest.mark.parametrize("name", halves[1])
def test_gradients_and_dropout(name):
    """Every parameter of a layer has a gradient, and dropout follows its key."""
    config = replace(CONFIGS[name], attention_dropout_rate=0.2)
    mixer, x = (
        MIXERS[name](config),
        np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32),
    )
    carry = jax.tree.map(lambda a: a + 1, mixer.carry(x))

    @jit
    def run(p, key):
        def loss(p):
            context = Context(
                masks.causal(), jnp.arange(5)[None], layer=1, carry=carry, dropout_key=key
            )
            return jnp.sum(jnp.sin(mixer.apply(p, jnp.asarray(x), context).out))

        return jax.value_and_grad(loss)(p)

    p = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), drawn(mixer.spec))
    value, gradient = run(p, jax.random.key(1))
    assert abs(run(p, jax.random.key(2))[0] - value) > 1e-4
    for path, leaf in params.paths(gradient).items():
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-4, path


@pytest.mark.thorough
def test_scanned_equals_unrolled_where_layers_know_their_number():
    config, p = made("differential")
    ids = np.ones_like(TOKENS)
    unrolled, scanned = (logits_of(replace(config, unroll=n), p, TOKENS, ids) for n in (2, 1))
    close(unrolled, scanned)


@pytest.mark.thorough
def test_value_residual_through_scan_and_remat():
    """What the first layer hands on has its gradient: that of the loss along a random direction."""
    config = CONFIGS["value_residual"]
    remat, ids = replace(config, remat="full"), np.ones_like(TOKENS)
    loss = lambda logits: jnp.mean(jnp.square(logits))
    with jax.enable_x64(True):
        p, to = (jax.tree.map(jnp.asarray, drawn(models.spec(config), seed)) for seed in (0, 1))
        gradient = jit(
            jax.grad(lambda p: loss(models.apply(remat, p, jnp.asarray(TOKENS)).logits))
        )(p)
        slope = sum(
            np.vdot(a, b)
            for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(to), strict=True)
        )
        moved = lambda step: jax.tree.map(lambda a, b: a + step * b, p, to)
        up, down = (loss(logits_of(config, moved(step), TOKENS, ids)) for step in (1e-6, -1e-6))
        # a central difference: 1e-16 / 1e-6 of rounding, the square of 1e-6 of curvature
        np.testing.assert_allclose((up - down) / 2e-6, slope, rtol=1e-7)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_and_attention_maps_in_shape(name):
    """Nothing widens a 16-bit model, cached or not; a map a layer and head can be had of each."""
    config = CONFIGS[name]
    p = params.abstract(models.spec(config))
    cache = jax.eval_shape(lambda: decoding.init_cache(config, 2, T, jnp.bfloat16))
    name = "layers/*/attention/weights"
    options = dict(dtype=jnp.bfloat16, intermediates=(name,))
    run = lambda p, cache: models.apply(config, p, jnp.asarray(TOKENS), cache=cache, **options)
    out = jax.eval_shape(run, p, cache)
    assert out.hidden.dtype == jnp.bfloat16 and out.logits.dtype == jnp.float32
    assert jax.tree.map(lambda a: a.dtype, out.cache.layers) == jax.tree.map(
        lambda a: a.dtype, cache.layers
    )
    assert out.intermediates[name].shape == (config.num_layers, 2, 4, T, T)
    assert jax.eval_shape(lambda p: run(p, None), p).hidden.dtype == jnp.bfloat16


def mixed(config, p, x, mask):
    @jit
    def run(p, x):
        return (
            layout.kinds(config)[0]
            .mixer.apply(p, x, Context(mask, jnp.arange(x.shape[1])[None]))
            .out
        )

    return run(*jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (p, x)))


@pytest.mark.thorough
def test_blockwise_equals_the_reference():
    """Values wider than keys, with segments and rules that are not of distance alone."""
    config, x = CONFIGS["differential"], np.random.default_rng(1).normal(size=(2, T, 16))
    mask = masks.causal() & (masks.window(2) | masks.global_tokens((1,)))
    mask = mask & masks.segments(jnp.array([[1] * 3 + [2] * 5] * 2))
    expected, blockwise = (
        mixed(
            replace(config, attention_implementation=kind),
            drawn(zoo.differential.differential(config).spec),
            x,
            mask,
        )
        for kind in ("reference", "blockwise")
    )
    close(blockwise, expected)


@pytest.mark.thorough
def test_inverse_depth_scale_is_smaller_queries():
    """Layer l with a query matrix 1 / (l + 1) as large."""
    config, p = made("inverse_depth_scale")
    query = p["layers"]["attention"]["query"]["kernel"]
    smaller = query / (1 + jnp.arange(len(query))).reshape(-1, 1, 1, 1)
    plain = p | {
        "layers": p["layers"]
        | {"attention": p["layers"]["attention"] | {"query": {"kernel": smaller}}}
    }
    ours = logits_of(config, p, TOKENS, np.ones_like(TOKENS))
    close(ours, logits_of(replace(config, mixer=None), plain, TOKENS, np.ones_like(TOKENS)))
    assert (
        np.abs(ours - logits_of(replace(config, mixer=None), p, TOKENS, np.ones_like(TOKENS))).max()
        > 1e-3
    )


def test_what_is_refused():
    for kernel in ("blockwise", "splash", "cudnn"):
        with pytest.raises(
            NotImplementedError, match=f"{kernel}: no sigmoid attention; .*'reference' has it"
        ):
            models.spec(replace(MODEL, mixer=zoo.sigmoid.sigmoid, attention_implementation=kernel))
    assert models.spec(
        replace(MODEL, mixer=zoo.sigmoid.sigmoid, attention_implementation="reference")
    )
    with pytest.raises(ConfigError, match="pairs heads; 1 key/value heads are an odd number"):
        models.spec(replace(MODEL, num_kv_heads=1, mixer=zoo.differential.differential))
