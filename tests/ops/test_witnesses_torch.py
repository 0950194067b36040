"""Whole forward passes of torch and transformers rebuilt from our functions, and what other
attentions take for granted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import attention
from jaxformer.ops.einsum import add_bias, einsum
from jaxformer.ops.feedforward import ACTIVATIONS, mlp
from jaxformer.ops.norms import layer_norm
from tests.witnesses import gpt_neo, load, torch_transformer

# float64 through up to four layers, all of order one: 1e-11 leaves five digits for the order of
# summation.
FLOAT64 = dict(rtol=1e-11, atol=1e-11)


def weights_of(arrays):
    return {
        name.removeprefix("weights/"): jnp.asarray(x, jnp.float64)
        for name, x in arrays.items()
        if "weights/" in name
    }


def linear(x, weight, bias=None):
    """torch.nn.Linear: weight [out, in]."""
    return add_bias(einsum("btd,fd->btf", x, weight), bias)


def heads(x, N):
    return x.reshape(*x.shape[:2], N, -1)


def torch_forward(source, target, shown, w, first):
    """nn.Transformer with ReLU; True in `shown` is a source token that may be seen, where torch's
    masks say the opposite."""
    m = torch_transformer
    norm = lambda x, name: layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], m.EPS)

    def attend(x, memory, name, mask):
        projections = zip(
            *(jnp.split(w[f"{name}.in_proj_{kind}"], 3) for kind in ("weight", "bias")), strict=True
        )
        q, k, v = (
            heads(linear(y, *p), m.N) for y, p in zip((x, memory, memory), projections, strict=True)
        )
        out = attention(q, k, v, mask=mask).reshape(x.shape)
        return linear(out, w[f"{name}.out_proj.weight"], w[f"{name}.out_proj.bias"])

    def feed(x, p):
        up, down = w[f"{p}.linear1.weight"].T, w[f"{p}.linear2.weight"].T
        return mlp(x, up, down, ACTIVATIONS["relu"], w[f"{p}.linear1.bias"], w[f"{p}.linear2.bias"])

    def residual(x, f, name):
        return x + f(norm(x, name)) if first else norm(x + f(x), name)

    for i in range(m.LAYERS):
        p = f"encoder.layers.{i}"
        source = residual(
            source, lambda x, p=p: attend(x, x, f"{p}.self_attn", shown), f"{p}.norm1"
        )
        source = residual(source, lambda x, p=p: feed(x, p), f"{p}.norm2")
    # torch has it after post-norm layers too; the paper does not
    source = norm(source, "encoder.norm")
    for i in range(m.LAYERS):
        p = f"decoder.layers.{i}"
        target = residual(
            target, lambda x, p=p: attend(x, x, f"{p}.self_attn", masks.causal()), f"{p}.norm1"
        )
        target = residual(
            target, lambda x, p=p: attend(x, source, f"{p}.multihead_attn", shown), f"{p}.norm2"
        )
        target = residual(target, lambda x, p=p: feed(x, p), f"{p}.norm3")
    return norm(target, "decoder.norm")


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["post", "pre"])
def test_torch_transformer(order):
    with jax.enable_x64(True):
        arrays = load("torch_transformer")
        w = weights_of(arrays)

        @jax.jit
        def run(source, target, lengths, w):
            return torch_forward(source, target, masks.lengths(kv=lengths), w, first=order == "pre")

        out = run(arrays["source"], arrays["target"], arrays["lengths"], w)
        np.testing.assert_allclose(out, arrays[order], **FLOAT64)


@pytest.mark.thorough
def test_torch_scaled_dot_product_attention():
    """Its heads are grouped like ours, rows that see nothing are zeros like ours, its is_causal
    starts at the top left."""
    with jax.enable_x64(True):
        w = load("torch_transformer")
        hidden = jnp.where(
            jnp.arange(3)[None, None, :, None] == 1, -jnp.inf, jnp.zeros((1, 1, 3, 5))
        )

        @jax.jit
        def run(*arrays):
            return {
                "grouped": attention(*arrays),
                "is_causal": attention(*arrays, mask=masks.causal().at(0)),
                "nothing_seen": attention(*arrays, bias=hidden),
                "bottom right": attention(*arrays, mask=masks.causal()),
            }

        ours = run(w["query"], w["key"], w["value"])
        for name in ("grouped", "is_causal", "nothing_seen"):
            np.testing.assert_allclose(ours[name], w[name], err_msg=name, **FLOAT64)
        assert (w["nothing_seen"][:, 1] == 0).all()
        # ours without at(0), which decoding needs
        assert np.abs(ours["bottom right"] - w["is_causal"]).max() > 1e-2


@pytest.mark.thorough
def test_jax_dot_product_attention():
    """jax.nn aligns top left and groups heads as torch does, its windows count both ends; a row
    that sees nothing leaks."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(1, n, h, 4)), jnp.float32) for n, h in ((3, 4), (5, 2), (5, 2))
    )
    square = [jnp.asarray(rng.normal(size=(1, 7, 2, 4)), jnp.float32) for _ in range(3)]
    visible = jnp.asarray(np.arange(3)[:, None] != np.full(5, 1)[None])[None, None]
    theirs = jax.nn.dot_product_attention

    @jax.jit
    def run(query, key, value, square):
        pairs = {
            "grouped": (attention(query, key, value), theirs(query, key, value)),
            "top left": (
                attention(query, key, value, mask=masks.causal().at(0)),
                theirs(query, key, value, is_causal=True),
            ),
        }
        for left, right in ((2, 2), (2, 0), (0, 3)):
            ours = attention(*square, mask=masks.window(left, right))
            pairs[f"window {left} {right}"] = ours, theirs(*square, local_window_size=(left, right))
        return pairs, theirs(query, key, value, mask=visible)

    pairs, leaking = run(query, key, value, square)
    for name, (ours, other) in pairs.items():
        # float32 softmax of some sums of four products
        np.testing.assert_allclose(ours, other, rtol=2e-6, atol=2e-6, err_msg=name)
    # not ours: the uniform mean of values that the query may not see
    mean = np.repeat(np.asarray(value).mean(1), 2, axis=1)
    np.testing.assert_allclose(leaking[:, 1], mean, rtol=2e-6, atol=2e-6)


@pytest.mark.thorough
def test_gpt_neo():
    """Layers that see all earlier tokens and layers that see the last four, in turn; scores are not
    scaled."""
    m = gpt_neo
    pattern = masks.causal(), masks.causal() & masks.window(m.WINDOW - 1)
    with jax.enable_x64(True):
        arrays = load("gpt_neo")
        w = {name.removeprefix("transformer."): x for name, x in weights_of(arrays).items()}

        @jax.jit
        def run(tokens, w):
            norm = lambda x, name: layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], m.EPS)
            x = w["wte.weight"][tokens] + w["wpe.weight"][None, : tokens.shape[1]]
            for i in range(m.LAYERS):
                p, mask = f"h.{i}", pattern[i % 2]
                y = norm(x, f"{p}.ln_1")
                a = f"{p}.attn.attention"
                q, k, v = (heads(linear(y, w[f"{a}.{name}_proj.weight"]), m.N) for name in "qkv")
                out = attention(q, k, v, mask=mask, scale=1.0).reshape(x.shape)
                x = x + linear(out, w[f"{a}.out_proj.weight"], w[f"{a}.out_proj.bias"])
                up, down = (w[f"{p}.mlp.{name}.weight"].T for name in ("c_fc", "c_proj"))
                biases = w[f"{p}.mlp.c_fc.bias"], w[f"{p}.mlp.c_proj.bias"]
                x = x + mlp(norm(x, f"{p}.ln_2"), up, down, ACTIVATIONS["gelu_tanh"], *biases)
            return linear(norm(x, "ln_f"), w["wte.weight"])

        logits = run(arrays["tokens"], w)
        # GPT-Neo computes its scores and softmax in float32, whatever its weights: 6e-8 a layer, of
        # numbers up to four
        np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=1e-6)
