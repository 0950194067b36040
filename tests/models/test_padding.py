"""A row's logits are those of the row alone: whatever pads it, is packed with it, or was cached
before it or beside it."""

import itertools
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, zoo
from jaxformer.errors import ConfigError
from jaxformer.families.falcon import falcon_alibi
from jaxformer.families.qwen_moe import GatedShared
from jaxformer.families.t5 import RelativeByLayer
from jaxformer.masks import Mask, causal
from jaxformer.models import (
    Alibi,
    Axial,
    Learned,
    Mixture,
    ModelConfig,
    Relative,
    Sinusoidal,
    blocks,
)
from jaxformer.models.norm import one_plus_rms_norm
from jaxformer.ops.bias import Bias
from jaxformer.ops.positions import NTK, Linear, Llama3, Rope, YaRN

V, T = 11, 5  # the vocabulary, the length of a sequence
ONE, OTHER = np.random.default_rng(0).integers(0, V, (2, T)).astype(np.int32)
JUNK = np.full(T, 7, np.int32)

MODEL = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    context_length=16,
    d_ff=8,
    feedforward="relu",
    norm="rms_norm",
    use_bias=False,
    tie_embeddings=False,
    init_std=0.5,
)


def steps(config):
    """A function of the distance."""
    return lambda q, kv: (
        -0.5 * jnp.abs(q[:, None] - kv[None])[None] * jnp.ones((config.num_heads, 1, 1))
    )


def places(config):
    """A function of absolute positions, by head."""
    rates = jnp.arange(1.0, 1 + config.num_heads)[:, None, None]
    return lambda q, kv: (
        jnp.sin(rates * q[None, :, None]) * jnp.cos(0.7 * rates * kv[None, None, :])
    )


def rule(config):
    """The same as a value with an array."""
    return Bias(
        lambda bias, q, kv: bias.arrays[0] * places(config)(q, kv)[None], arrays=(jnp.ones(()),)
    )


def distances(config):
    return Bias(
        lambda bias, d: jnp.cos(d)[None] * jnp.ones((config.num_heads, 1)), by_distance=True
    )


POSITIONS = {
    "learned": Learned(),
    "offset": Learned(2),
    "sinusoidal": Sinusoidal(),
    "axial": Axial((2, 8), (6, 10)),
    "rope": Rope(),
    "partial": Rope(fraction=0.5, layout="interleaved"),
    "linear": Rope(scaling=Linear(2.0)),
    "ntk": Rope(scaling=NTK(4.0)),
    "llama3": Rope(scaling=Llama3(8.0, 4)),
    "yarn": Rope(scaling=YaRN(8.0, 4)),
    "alibi": Alibi(),
    "relative": Relative(4, 6, False),
    "none": None,
    "turns": (Rope(), None),
    "steps": steps,
    "places": places,
    "rule": rule,
    "distances": distances,
}
BIASES = "alibi", "relative", "steps", "places", "rule", "distances"
MIXERS = {
    "attention": None,
    "qk_norm": zoo.qk_norm.qk_norm,
    "qk_norm_full": zoo.qk_norm.qk_norm_full,
    "qk_model_norm": zoo.qk_norm.qk_model_norm,
    "qk_layer_norm": zoo.qk_layer_norm.qk_layer_norm,
    "sinks": zoo.sinks.sinks,
    "gated": zoo.gated.gated,
    "differential": zoo.differential.differential,
    "sigmoid": zoo.sigmoid.sigmoid,
    "value_residual": zoo.value_residual.value_residual,
    "temperature": partial(zoo.temperature.temperature, floor_scale=2, attn_scale=0.5),
}
MASKS = {
    "window": causal() & masks.window(2),
    "chunked": causal() & masks.chunked(2, 1),
    "prefix": causal() | masks.prefix(2),
    "columns": causal() & (masks.columns(3, 1) | masks.window(0)),
    "globals": causal() & masks.longformer(2, 1),
    "random": causal() & masks.random_blocks(1, 2),
    "by_head": masks.by_head(*[causal() & masks.chunked(2)] * 4),
    "yours": causal() & Mask(lambda mask, q, kv: (q + kv) % 3 != 1),
}


@cache
def drawn(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.float32(0.6 * rng.normal(size=leaf.shape)), models.spec(config)
    )


def run(config, tokens, **options):
    """Without jit: the same few operations serve every config here, which would each be compiled
    for a second."""
    return models.apply(config, drawn(config), jnp.asarray(tokens), **options)


def close(a, b):
    # float32 sums in another order, of numbers of order one, a layer deep
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def ids(*counts):
    """Segment ids of a row: pairs of an id and its number of tokens."""
    return [i for i, count in counts for _ in range(count)]


def joined(*pairs):
    return np.stack([np.concatenate(pair).astype(np.int32) for pair in pairs])


def check_rows_alone(config):
    one, other = np.asarray(run(config, np.stack([ONE, OTHER])).logits)
    rows = joined((JUNK, ONE), (ONE, JUNK), (OTHER, ONE))
    segments = jnp.array([ids((0, T), (1, T)), ids((1, T), (0, T)), ids((1, T), (2, T))], jnp.int32)
    left, right, packed = np.asarray(run(config, rows, segment_ids=segments).logits)
    close(left[T:], one)
    close(right[:T], one)
    close(packed, np.concatenate([other, one]))
    return one


def check_decoding(config, one, first):
    """`first` tokens, before padding in one row of two, then the others one by one, in a cache with
    more room than that."""
    prompt = joined((ONE[:first], JUNK[first:]), (ONE[:first], ONE[first:]))
    out = run(
        config, prompt, lengths=jnp.array([first, T]), cache=decoding.init_cache(config, 2, 12)
    )
    close(out.logits[0, :first], one[:first])
    close(out.logits[1], one)
    for k in range(first, T):
        out = run(config, np.full((2, 1), ONE[k]), cache=out.cache)
        close(out.logits[0, 0], one[k])


SOME = [(p, "attention") for p in ("learned", "rope", "relative", "places", "rule")]
SOME += [(p, "sigmoid") for p in ("alibi", "places")]
REST = [pair for pair in itertools.product(POSITIONS, MIXERS) if pair not in SOME]


def slowly(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.thorough
@pytest.mark.parametrize(("positions", "mixer"), [*SOME, *slowly(REST)])
def test_positions_and_variants(positions, mixer):
    layers = 2 if positions == "turns" or mixer == "value_residual" else 1
    config = replace(
        MODEL, positions=POSITIONS[positions], mixer=MIXERS[mixer], num_layers=layers, unroll=layers
    )
    check_decoding(config, check_rows_alone(config), 3)


OTHER_PARTS = {
    "clamped_mixture": dict(feedforward=zoo.ClampedMixture(4, 2)),
    "grouped_experts": dict(feedforward=zoo.GroupedExperts(8, 3, groups=4, top_groups=2, shared=6)),
    "gated_shared": dict(feedforward=GatedShared(Mixture(4, 2, d_ff=12), d_ff=20)),
    "falcon_alibi": dict(positions=falcon_alibi),
    "relative_by_layer": dict(mixer=RelativeByLayer(Relative(6, 8, False)), positions=None),
    "one_plus_rms_norm": dict(norm=one_plus_rms_norm, positions=Rope()),
    "parallel_norms": dict(block=blocks.parallel_norms, positions=Rope()),
    "latent_attention": dict(
        mixer=zoo.LatentAttention(rank=6, rotated=4, query_rank=8, value_width=5),
        num_kv_heads=None,
        head_width=12,
        positions=Rope(),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHER_PARTS)
def test_parts_of_families(name):
    config = replace(MODEL, **OTHER_PARTS[name])
    check_decoding(config, check_rows_alone(config), 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mixer"),
    [*((name, "attention") for name in MASKS), *slowly((name, "sigmoid") for name in MASKS)],
)
def test_masks_on_absolute_positions(name, mixer):
    """A prefix or a chunk is the sequence's own."""
    config = replace(MODEL, positions=Rope(), masks=(MASKS[name],), mixer=MIXERS[mixer])
    check_decoding(config, check_rows_alone(config), 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(p, marks=() if p in (*BIASES, "learned", "rope") else pytest.mark.slow)
        for p in POSITIONS
    ],
)
def test_the_callers_positions_are_the_tokens(name):
    """Tokens that change places and keep their positions keep their logits, where all see all."""
    layers = 2 if name == "turns" else 1
    config = replace(
        MODEL, positions=POSITIONS[name], masks=(masks.full(),), num_layers=layers, unroll=layers
    )
    order = np.array([3, 0, 4, 1, 2])
    there = np.arange(T)[None]
    logits = np.asarray(run(config, ONE[None]).logits)
    close(
        run(config, ONE[None, order], positions=jnp.asarray(there[:, order])).logits,
        logits[:, order],
    )
    two = jnp.asarray(np.concatenate([there, there[:, order]]))
    found = run(config, np.stack([ONE, ONE[order]]), positions=two).logits
    close(found, np.concatenate([logits, logits[:, order]]))


TURNS = {
    "learned": dict(positions=Learned()),
    "rope": dict(positions=Rope()),
    "linear": dict(mixer=zoo.Linear()),
    **{name: dict(positions=POSITIONS[name]) for name in ("alibi", "relative", "places")},
    **{name: dict(masks=(MASKS[name],)) for name in ("window", "chunked")},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("learned", "places", "window") else pytest.mark.slow)
        for n in TURNS
    ],
)
def test_a_second_turn_that_is_padded(name):
    """The next tokens of two rows, of different number; then one row waits while the other goes
    on."""
    config = replace(MODEL, **TURNS[name])
    one, other = np.asarray(run(config, np.stack([ONE, OTHER])).logits)
    cache = run(
        config, np.stack([ONE, OTHER])[:, :1], cache=decoding.init_cache(config, 2, 9)
    ).cache
    turn = joined((ONE[1:3], JUNK[:2]), (OTHER[1:4], JUNK[:1]))
    out = run(config, turn, lengths=jnp.array([2, 3]), cache=cache)
    close(out.logits[0, :2], one[1:3])
    close(out.logits[1, :3], other[1:4])
    for k in (3, 4):
        out = run(config, np.full((2, 1), ONE[k]), lengths=jnp.array([1, 0]), cache=out.cache)
        close(out.logits[0, 0], one[k])
    out = run(config, np.full((2, 1), OTHER[4]), lengths=jnp.array([0, 1]), cache=out.cache)
    close(out.logits[1, 0], other[4])
    assert out.cache.lengths.tolist() == [T, T]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "mixer"), [("places", "attention"), ("relative", "differential")])
def test_blockwise_and_its_gradient_equal_the_reference(name, mixer):
    tokens = jnp.asarray(joined((JUNK, ONE), (OTHER, ONE)))
    segments = jnp.array([ids((0, T), (1, T)), ids((1, T), (2, T))], jnp.int32)

    @partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
    def gradient(config, p):
        logits = lambda p: models.apply(config, p, tokens, segment_ids=segments).logits[:, T:]
        return jax.value_and_grad(lambda p: jnp.sum(jnp.sin(logits(p))))(p)

    config = replace(MODEL, positions=POSITIONS[name], mixer=MIXERS[mixer])
    expected, found = (
        gradient(replace(config, attention_implementation=kind), drawn(config))
        for kind in ("reference", "blockwise")
    )
    jax.tree.map(close, found, expected)


@pytest.mark.thorough
def test_what_depends_on_slots_is_refused():
    segments = jnp.array([ids((0, T), (1, T))], jnp.int32)
    row = joined((JUNK, ONE))
    array = lambda config: jnp.zeros((1, config.num_heads, 2 * T, 2 * T))
    by_row = lambda config: lambda q, kv: jnp.zeros((2, config.num_heads, len(q), len(kv)))
    assert np.isfinite(run(replace(MODEL, positions=array), row).logits).all()
    for positions in (array, by_row):
        with pytest.raises(ConfigError, match="positions: a bias"):
            run(replace(MODEL, positions=positions), row, segment_ids=segments)
    for name in BIASES:
        config = replace(MODEL, positions=POSITIONS[name])
        with pytest.raises(ConfigError, match="the cached tokens' positions"):
            run(
                config,
                row,
                positions=jnp.arange(2 * T)[None],
                cache=decoding.init_cache(config, 1, 12),
            )
    with pytest.raises(ConfigError, match="positions: a bias"):
        run(replace(MODEL, positions=array), row, cache=decoding.init_cache(MODEL, 1, 12))
    cache = run(MODEL, row, cache=decoding.init_cache(MODEL, 1, 12)).cache
    with pytest.raises(ConfigError, match="positions: a bias"):
        run(replace(MODEL, positions=by_row), row[:, :1], cache=cache)
    with pytest.raises(
        ConfigError, match="1 rows of 10 tokens do not fit a cache of 1 rows of 9 slots"
    ):
        run(MODEL, row, cache=decoding.init_cache(MODEL, 1, 9))


@pytest.mark.thorough
def test_a_cache_that_is_too_full_gives_nan():
    """Its last slots would be overwritten, and the tokens' positions be others."""
    cache = decoding.init_cache(MODEL, 1, T + 1)
    for k, fits in ((T, True), (1, True), (1, False)):
        out = run(MODEL, ONE[None, :k], cache=cache)
        cache = out.cache
        assert np.isfinite(out.logits).all() if fits else np.isnan(out.logits).all()
