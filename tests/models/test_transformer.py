"""Properties of the stack, over random configurations and inputs."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import Embedding, ModelConfig, Sinusoidal, blocks
from jaxformer.models.layer import Mixer
from jaxformer.models.stacks.remat import POLICIES
from jaxformer.ops.positions import Rope
from jaxformer.params import Spec

V, T = 23, 9
GPT = ModelConfig(
    vocab_size=V, num_layers=3, d_model=24, num_heads=3, context_length=16, init_std=0.3
)
# every family of the presets at toy size, and what no preset has
FAMILIES = {
    "gpt2": GPT,
    "gpt3": replace(GPT, num_layers=5, masks=(masks.causal(), masks.causal() & masks.window(2))),
    "llama": replace(
        GPT,
        norm="rms_norm",
        feedforward="swiglu",
        positions=Rope(),
        use_bias=False,
        tie_embeddings=False,
        num_kv_heads=1,
    ),
    "post_norm": replace(GPT, block=blocks.post_norm, positions=Sinusoidal(), feedforward="relu"),
    "sandwich": replace(
        GPT,
        block=blocks.sandwich,
        attention_softcap=5.0,
        logit_softcap=7.0,
        embedding=Embedding(scale=24**0.5),
    ),
    "wide_heads": replace(
        GPT,
        head_width=10,
        d_ff=17,
        positions=Rope(fraction=0.4, layout="interleaved"),
        num_kv_heads=3,
    ),
}


# One family's tests in a row: most of their time is compilation, and they share what they compile.
families = pytest.mark.parametrize("name", FAMILIES, scope="module")


def fast(*names):
    """Of the other families the test is slow."""
    some = [pytest.param(n, marks=() if n in names else pytest.mark.slow) for n in FAMILIES]
    return pytest.mark.parametrize("name", some, scope="module")


@cache
def make(name):
    config = FAMILIES[name]
    tokens = np.random.default_rng(1).integers(0, V, (2, T)).astype(np.int32)
    return config, jax.jit(partial(models.init, config))(jax.random.key(0)), tokens


def close(a, b, tolerance=2e-6):
    # float32 sums in another order: some 1e-7 relative, a few layers deep
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * float(np.abs(np.asarray(b)).max())
    )


def flat(tree):
    """One vector: a key bias, whose gradient is zero but for rounding, is then measured against the
    others."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


MAPS = ("layers/*/attention/weights",)
apply = jax.jit(models.apply, static_argnums=0, static_argnames=("dtype", "intermediates"))


@partial(jax.jit, static_argnums=(0, 3, 4))
def loss_and_gradient(config, parameters, tokens, dtype=jnp.float32, maps=True):
    """(loss, (logits, attention maps)), gradient."""

    def loss(p):
        out = models.apply(config, p, tokens, dtype=dtype, intermediates=MAPS if maps else ())
        return jnp.mean(jnp.square(out.logits)), (
            out.logits,
            out.intermediates and out.intermediates[MAPS[0]],
        )

    return jax.value_and_grad(loss, has_aux=True)(parameters)


@pytest.mark.thorough
@families
def test_spec_and_init_agree(name):
    config, parameters, _ = make(name)
    abstract = params.abstract(models.spec(config))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), parameters) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract
    )


@pytest.mark.thorough
@families
def test_causal(name):
    """Changing token k leaves the logits before k alone, and changes some after it."""
    config, parameters, tokens = make(name)
    logits = np.asarray(apply(config, parameters, tokens).logits)
    for k in (0, T // 2, T - 1):
        changed = tokens.copy()
        changed[:, k] = (changed[:, k] + 1) % V
        other = np.asarray(apply(config, parameters, changed).logits)
        close(other[:, :k], logits[:, :k]) if k else None
        assert np.abs(other[:, k:] - logits[:, k:]).max() > 1e-3


@pytest.mark.thorough_after(1)
@fast("gpt3", "llama", "wide_heads")
def test_padding_on_either_side_and_packing_change_nothing(name):
    """One row among padding before it or behind it, and behind another document, is the row
    alone."""
    config, parameters, tokens = make(name)
    logits = np.asarray(apply(config, parameters, tokens).logits)
    junk = np.random.default_rng(9).integers(0, V, (2, 4)).astype(np.int32)
    side_by_side = lambda *parts: np.concatenate(parts, axis=1)

    def beside(tokens, segment_ids):
        return np.asarray(apply(config, parameters, tokens, segment_ids=segment_ids).logits)

    ids = np.ones_like(tokens)
    close(beside(side_by_side(junk, tokens), side_by_side(junk * 0, ids))[:, 4:], logits)
    close(beside(side_by_side(tokens, junk), side_by_side(ids, junk * 0))[:, :T], logits)
    packed = beside(side_by_side(tokens[:, :4], tokens), side_by_side(ids[:, :4], 2 * ids))
    close(packed[:, :4], logits[:, :4])  # of a causal model: nothing behind them matters
    close(packed[:, 4:], logits)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("gpt3", "llama") else pytest.mark.slow) for n in FAMILIES],
    scope="module",
)
def test_scanned_equals_unrolled_equals_remat(name):
    """In logits, loss gradient and attention maps."""
    config, parameters, tokens = make(name)
    config = replace(config, unroll=1)
    (_, (logits, attention)), gradient = loss_and_gradient(config, parameters, tokens)
    assert attention.shape == (config.num_layers, 2, config.num_heads, T, T)
    changes = [dict(unroll=99, remat="full")]
    if name == "gpt3":  # five layers in a pattern of two: the one with a remainder
        changes += [dict(unroll=2, remat="dots")]
    for change in changes:
        changed = replace(config, **change)
        (_, (other_logits, other_attention)), other_gradient = loss_and_gradient(
            changed, parameters, tokens
        )
        close(other_logits, logits)
        close(other_attention, attention)
        close(flat(other_gradient), flat(gradient), 1e-5)


@pytest.mark.thorough
@fast("gpt2", "post_norm", "sandwich")
def test_bfloat16_activations_stay_near_and_gradients_are_float32(name):
    config, parameters, tokens = make(name)
    (exact, _), exact_gradient = loss_and_gradient(config, parameters, tokens)
    # without maps: keeping them takes another, exact softmax
    (rough, _), gradient = loss_and_gradient(config, parameters, tokens, jnp.bfloat16, False)
    np.testing.assert_allclose(rough, exact, rtol=0.05)  # 8 bits of mantissa through a few layers
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))
    a, b = flat(gradient), flat(exact_gradient)
    assert np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


@pytest.mark.thorough
def test_jax_disable_jit_gives_the_same_values():
    """In its own process, since the switch is read everywhere."""
    code = """
import jax, numpy as np
from jaxformer import masks, models, params
c = models.ModelConfig(vocab_size=23, num_layers=3, d_model=24, num_heads=3, context_length=16,
                       masks=(masks.causal(), masks.causal() & masks.window(2)))
rng = np.random.default_rng(0)
draw = lambda leaf: jax.numpy.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)
p = jax.tree.map(draw, params.abstract(models.spec(c)))
logits = np.asarray(models.apply(c, p, jax.numpy.arange(6)[None]).logits[0, -1]).tolist()
"""
    here = {}
    exec(code, here)
    environment = os.environ | {"JAX_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", code + "print(logits)"]
    there = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    close(np.array(eval(there)), np.array(here["logits"]))


@pytest.mark.thorough
def test_layer_masks_follow_their_pattern():
    """Layers 0, 2, 4 see everything before them; 1 and 3 see two tokens back."""
    config, parameters, tokens = make("gpt3")
    attention = apply(config, parameters, tokens, intermediates=MAPS).intermediates[MAPS[0]]
    for layer in range(5):
        far = attention[layer, :, :, 8, :6]
        assert bool((far == 0).all()) == (layer % 2 == 1)


@pytest.mark.thorough
def test_dropout_needs_a_key_and_follows_it():
    config, parameters, tokens = make("gpt2")
    config = replace(config, dropout_rate=0.3, attention_dropout_rate=0.3, unroll=1)
    run = lambda key: apply(config, parameters, tokens, dropout_key=key).logits
    close(run(None), apply(FAMILIES["gpt2"], parameters, tokens).logits)
    scanned = run(jax.random.key(1))
    np.testing.assert_array_equal(scanned, run(jax.random.key(1)))
    assert jnp.abs(scanned - run(jax.random.key(2))).max() > 1e-2
    close(
        scanned,
        apply(replace(config, unroll=9), parameters, tokens, dropout_key=jax.random.key(1)).logits,
    )


def mean_mixer(config):
    """Every position gets the mean of what its mask shows, through one matrix: a research variant
    in ten lines."""
    D = config.d_model
    spec = {
        "kernel": Spec((D, D), ("embed", "embed_out"), jax.nn.initializers.normal(0.3), ("embed",))
    }

    def apply(params, x, context):
        seen = context.mask(*context.mask.positions(x.shape[1], x.shape[1]))[:, 0].astype(x.dtype)
        mean = jnp.einsum("bts,bsd->btd", jnp.broadcast_to(seen, (x.shape[0], *seen.shape[1:])), x)
        return (
            jnp.einsum("btd,de->bte", mean / seen.sum(-1, keepdims=True), params["kernel"]),
            None,
            None,
        )

    return Mixer(spec, apply, lambda batch, length, dtype: {})


@pytest.mark.thorough
def test_a_users_mixer_replaces_attention():
    config, _, tokens = make("gpt2")
    config = replace(config, mixer=mean_mixer)
    parameters = models.init(config, jax.random.key(0))
    assert set(params.paths(parameters["layers"]["attention"])) == {"kernel"}
    logits = apply(config, parameters, tokens).logits
    changed = apply(config, parameters, np.where(np.arange(T) == 5, 0, tokens)).logits
    close(changed[:, :5], logits[:, :5])


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_heads=5), "num_heads=5 does not divide"),
        (dict(num_kv_heads=2), "num_kv_heads=2 does not divide"),
        (dict(feedforward="gelo"), "gelo"),
        (dict(masks=()), r"masks=\(\): expected a tuple of values"),
        (dict(num_layers=0), "num_layers=0"),
        (dict(dropout_rate=1.0), "dropout_rate"),
    ],
)
def test_bad_configs_are_refused_in_a_line(changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        replace(GPT, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [masks.causal(), (np.ones((3, 3), bool),), ("causal",)], ids=["bare", "array", "text"]
)
def test_masks_that_are_none_are_refused_in_a_line(wrong):
    config = replace(GPT)
    # the suite's own annotation checks stand before the constructor
    object.__setattr__(config, "masks", wrong)
    with pytest.raises(ConfigError, match=r"model\.masks=.*: expected a tuple of values") as caught:
        ModelConfig.__post_init__(config)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_models_run_under_jit_vmap_and_partial():
    config, parameters, tokens = make("llama")
    f = partial(models.apply, config)
    eager = f(parameters, jnp.asarray(tokens)).logits
    close(jax.jit(f)(parameters, tokens).logits, eager)
    close(jax.jit(jax.vmap(lambda row: f(parameters, row[None]).logits[0]))(tokens), eager)


# a policy of a user's own, which keeps queries alone
OWN_POLICY = jax.checkpoint_policies.save_only_these_names("query")


@pytest.mark.thorough
def test_what_is_kept_for_the_backward_pass_changes_no_gradient():
    """Whatever is computed again is the same, and "attention" computes no attention again."""
    length = 1024  # a row of one block of keys needs no loop
    config = ModelConfig(32, 2, 16, 2, length, attention_implementation="blockwise", unroll=1)
    weights = models.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, 32)
    loss = lambda config, weights: jnp.mean(
        jnp.square(models.apply(config, weights, tokens).logits)
    )
    programs = {
        remat: jax.jit(jax.grad(partial(loss, replace(config, remat=remat))))
        .lower(weights)
        .compile()
        for remat in (*POLICIES, OWN_POLICY)
    }
    loops = {remat: program.as_text().count(" while(") for remat, program in programs.items()}
    assert loops["attention"] == loops["qkv"] == loops["none"]
    assert loops["none"] < loops["full"] == loops["offload"] == loops["dots"] == loops[OWN_POLICY]
    # the same operations, which other fusions sum in another order
    for program in programs.values():
        same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-8)
        jax.tree.map(same, program(weights), programs["none"](weights))
