"""Every named system as a model's mixer: the properties of a stack, and dense attention where a
system contains it."""

from dataclasses import dataclass, fields, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import config as C, decoding, masks, models, ops, params, zoo
from jaxformer.decoding import Sampling
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig, blocks, mixers
from jaxformer.models.layer import Context, Mixer, MixerOutput, linear
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope
from jaxformer.params import Spec
from jaxformer.runs.names import MODEL, NAMES
from jaxformer.zoo import reversible

V, T, L = 13, 16, 2
CAUSAL = (masks.causal(),)
BASE = ModelConfig(
    vocab_size=V,
    num_layers=L,
    d_model=8,
    num_heads=2,
    context_length=T,
    masks=(masks.full(),),
    init_std=0.5,
    tie_embeddings=False,
)
SYSTEMS = {
    "longformer": replace(BASE, mixer=zoo.Longformer(4, 2), num_kv_heads=1, positions=Rope()),
    "bigbird": replace(BASE, mixer=zoo.BigBird(2, 1, "random")),
    "linear": replace(
        BASE, mixer=zoo.Linear(chunk=4), masks=CAUSAL, positions=Rope(), num_kv_heads=1
    ),
    "efficient": replace(BASE, mixer=zoo.Efficient(chunk=4), masks=CAUSAL),
    "efficient_full": replace(BASE, mixer=zoo.Efficient()),
    "performer": replace(BASE, mixer=zoo.Performer(12, chunk=4), masks=CAUSAL, num_kv_heads=1),
    "performer_full": replace(BASE, mixer=zoo.Performer(12, "relu")),
    "linformer": replace(BASE, mixer=zoo.Linformer(5), num_kv_heads=1),
    "linformer_layerwise": replace(BASE, mixer=zoo.Linformer(5, "layerwise"), positions=Rope()),
    "reformer": replace(BASE, mixer=zoo.Reformer(4), masks=CAUSAL, positions=Rope()),
    "reformer_full": replace(BASE, mixer=zoo.Reformer(4, buckets=(2, 4), chunks_after=1)),
}
# A softmax over keys does not feel what is added to all of them, unless positions turn it.
DEAD = {"bigbird": ("attention/key/bias",), "efficient_full": ("attention/key/bias",)}

# Compiling takes most of the time of this file, so without the backend's optimisations.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, V, (2, T)), jnp.int32)
ONES = np.ones((2, T), np.int32)


@cache
def parameters(config):
    """Random values for every parameter, from NumPy: those that start at zero or one would hide
    mistakes."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(scale=0.5, size=leaf.shape).astype(np.float32))
    return jax.tree.map(draw, params.abstract(models.spec(config)))


@partial(jit, static_argnums=0)
def logits_of(config, p, tokens, segment_ids, options):
    return models.apply(config, p, tokens, segment_ids=segment_ids, **options).logits


def run(config, p, tokens=TOKENS, segment_ids=ONES, **options):
    """As NumPy: what a test cuts and compares then compiles nothing."""
    return np.asarray(logits_of(config, p, tokens, segment_ids, options))


def close(a, b, tolerance=1e-5):
    # float32 sums in another order, a few layers deep, from numbers of order one
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# what differs by layer is parameters alone, constants, or nothing but what layers share
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "linformer_layerwise",
        "reformer",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("longformer", "bigbird", "performer")),
    ],
)
def test_unrolled_equals_scanned(name):
    config = SYSTEMS[name]
    unrolled, scanned = (run(replace(config, unroll=n), parameters(config)) for n in (L, 1))
    close(unrolled, scanned)


# one of these two of each system is fast
halves = [
    [pytest.param(n, marks=() if i % 2 == k else pytest.mark.slow) for i, n in enumerate(SYSTEMS)]
    for k in (0, 1)
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", halves[0])
def test_gradients_and_16_bits(name):
    """Of one layer's mixer: every parameter has a gradient, and bfloat16 input gives nearly what
    float32 does."""
    config = SYSTEMS[name]
    p = {
        "attention": jax.tree.map(
            lambda a: np.asarray(a)[0], parameters(config)["layers"]["attention"]
        )
    }
    p |= {"shared": parameters(config).get("shared")}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, T, 8)), jnp.float32)
    mixer = layout.kinds(config)[0].mixer
    constants = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[0]), mixer.constants(T))

    def loss(p, x):
        context = Context(
            config.masks[0], jnp.arange(T)[None], constants=constants, shared=p["shared"]
        )
        out = mixer.apply(p["attention"], x, context).out
        return jnp.sum(jnp.sin(out)), out

    @jit
    def both(p, x):
        return jax.grad(loss, has_aux=True)(p, x), loss(p, x.astype(jnp.bfloat16))[1]

    (gradients, exact), rough = both(p, x)
    assert rough.dtype == jnp.bfloat16
    # 8 bits of mantissa, but for tokens of Reformer's that hash to another bucket
    errors = np.linalg.norm(np.float32(rough) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert np.quantile(errors, 0.8) < 0.05, errors
    for path, leaf in params.paths({k: v for k, v in gradients.items() if v is not None}).items():
        assert np.isfinite(leaf).all(), path
        # what is zero but for rounding is below 1e-5, everything else well above
        assert (np.abs(leaf).max() < 1e-4) == (path in DEAD.get(name, ())), (
            path,
            np.abs(leaf).max(),
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", halves[1])
def test_padding_is_not_seen(name):
    """What stands in it does not matter; and where positions enter by distance or from the left,
    neither does it itself."""
    config, real = SYSTEMS[name], 11
    p, junk = parameters(config), (np.asarray(TOKENS) + 1) % V
    right = np.concatenate([ONES[:, :real], ONES[:, real:] * 0], axis=1)
    behind = [
        run(config, p, np.where(right == 1, TOKENS, x), right)[:, :real] for x in (TOKENS, junk)
    ]
    np.testing.assert_array_equal(*behind)
    left, shifted = np.roll(right, T - real, axis=1), np.roll(TOKENS, T - real, axis=1)
    before = [
        run(config, p, np.where(left == 1, shifted, x), left)[:, T - real :] for x in (TOKENS, junk)
    ]
    np.testing.assert_array_equal(*before)
    if name.startswith(("linear", "efficient", "performer")):
        close(before[0], behind[0])
    if name in ("longformer", "linformer_layerwise", "efficient_full", "performer_full"):
        close(behind[0], run(config, p, TOKENS[:, :real], ONES[:, :real]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [n for n in SYSTEMS if SYSTEMS[n].masks == CAUSAL and n != "reformer"]
)
def test_causal(name):
    config, k = SYSTEMS[name], 9
    logits, other = (
        run(config, parameters(config), (np.asarray(TOKENS) + n * (np.arange(T) >= k)) % V)
        for n in (0, 1)
    )
    close(other[:, :k], logits[:, :k])
    assert np.abs(other[:, k:] - logits[:, k:]).max() > 1e-3


@pytest.mark.thorough
def test_a_causal_reformer_takes_nothing_from_later_tokens():
    """They decide who else is in a chunk, so other tokens there change what comes before; but no
    gradient reaches them."""
    config, k = replace(SYSTEMS["reformer"], positions=models.Learned()), 9
    early = jit(jax.grad(lambda p: jnp.sum(jnp.sin(models.apply(config, p, TOKENS).logits[:, :k]))))
    rows = np.asarray(early(parameters(config))["embedding"]["positions"])
    assert (rows[k:] == 0).all() and (rows[:k] != 0).any(axis=1).all()


# Decoding


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_cached_pieces_equal_the_forward_pass(name):
    config = SYSTEMS[name]
    whole = run(config, parameters(config))
    step = jit(partial(models.apply, config))
    cache = decoding.init_cache(config, 2, T + 3, jnp.bfloat16)
    # sums never have fewer bits
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cache.layers))
    start = 0
    for length in (6, 1, 1, 6, 1, 1):
        out = step(parameters(config), TOKENS[:, start : start + length], cache=cache)
        close(out.logits, whole[:, start : start + length])
        cache, start = out.cache, start + length


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_greedy_generation_equals_forward_passes_for_ragged_prompts(name):
    config = SYSTEMS[name]
    prompts, new = [[1, 2, 3, 4, 5], [7], [4] * 8], 8
    outs = decoding.generate(
        config, parameters(config), prompts, new, sampling=Sampling(temperature=0.0)
    )
    rows = [prompt + out for prompt, out in zip(prompts, outs, strict=True)]
    tokens, ids = (
        np.array([r + [0] * (T - len(r)) for r in x]) for x in (rows, [[1] * len(r) for r in rows])
    )
    likeliest = run(config, parameters(config), tokens, ids).argmax(axis=-1)
    for prompt, out, best in zip(prompts, outs, likeliest, strict=True):
        assert best[len(prompt) - 1 : len(prompt) - 1 + new].tolist() == out


def test_decoding_refuses_what_sums_cannot_keep():
    config = SYSTEMS["linear"]
    step = jit(models.apply, static_argnums=0)
    packed = jnp.array([[1, 1, 2, 2], [0, 1, 1, 1]])
    cache = decoding.init_cache(config, 2, 8)
    with pytest.raises(ConfigError, match="a cache keeps one text a row; give `lengths`"):
        step(config, parameters(config), TOKENS[:, :4], segment_ids=packed, cache=cache)
    with pytest.raises(NotImplementedError, match=r"Linear decodes under causal\(\) alone"):
        step(replace(config, masks=(masks.full(),)), parameters(config), TOKENS[:, :4], cache=cache)
    others = [
        config
        for name, config in SYSTEMS.items()
        if name not in ("linear", "performer", "performer_full")
    ]
    for config in (*others, replace(BASE, mixer=zoo.LocalChunks(4), masks=CAUSAL)):
        with pytest.raises(
            NotImplementedError,
            match=rf"{type(config.mixer).__name__} cannot decode: .*Performer can",
        ):
            decoding.init_cache(config, 2, 8)


# Dense attention, where a system contains it


def dense(config, p, mask=masks.full()):
    attention = {name: p["layers"]["attention"][name] for name in ("query", "key", "value", "out")}
    p = {name: p[name] for name in p if name != "shared"} | {
        "layers": p["layers"] | {"attention": attention}
    }
    return run(replace(config, mixer=None, masks=(mask,)), p)


def with_attention(p, **changes):
    return p | {"layers": p["layers"] | {"attention": p["layers"]["attention"] | changes}}


@pytest.mark.thorough
def test_bigbird_of_few_blocks_sees_everything():
    config = replace(BASE, mixer=zoo.BigBird(4, 0, "zero"))
    close(run(config, parameters(config)), dense(config, parameters(config)))


@pytest.mark.thorough
@pytest.mark.parametrize("window, count", [(2 * T, 0), (4, 2)])
def test_longformer_with_equal_projections_is_its_mask(window, count):
    config = replace(BASE, mixer=zoo.Longformer(window, count))
    p = parameters(config)
    p = with_attention(
        p,
        **{f"global_{name}": p["layers"]["attention"][name] for name in ("query", "key", "value")},
    )
    expected = dense(config, p, masks.longformer(window, count))
    close(run(config, p), expected)
    if count:  # the same tokens as flags of a batch, traced
        flagged = replace(config, mixer=zoo.Longformer(window, max_globals=3))
        flags = np.broadcast_to(np.arange(T) < count, (2, T))
        close(run(flagged, p, inputs={"global_tokens": flags}), expected)


@pytest.mark.thorough
def test_linformer_of_full_rank_is_attention():
    config = replace(BASE, mixer=zoo.Linformer(T, "headwise"))
    p = parameters(config)
    identity = np.broadcast_to(np.eye(T, dtype=np.float32), (L, T, T))
    close(
        run(config, with_attention(p, key_projection=identity, value_projection=identity)),
        dense(config, p),
    )


def test_linformer_shares_what_it_says():
    shapes = {}
    for sharing in ("headwise", "key_value", "layerwise"):
        paths = params.paths(models.spec(replace(BASE, mixer=zoo.Linformer(5, sharing))))
        shapes[sharing] = sorted(
            (path.split("/")[0], leaf.shape) for path, leaf in paths.items() if "projection" in path
        )
    assert shapes == {
        "headwise": [("layers", (L, T, 5))] * 2,
        "key_value": [("layers", (L, T, 5))],
        "layerwise": [("shared", (T, 5))],
    }


@pytest.mark.thorough
def test_reformer_of_one_chunk_is_attention_to_unit_keys():
    """All tokens in one chunk: softmax over queries as keys of length one, a token itself only
    where there is no other."""
    config = replace(BASE, num_layers=1, mixer=zoo.Reformer(T, rounds=1), masks=CAUSAL)
    p = jax.tree.map(lambda a: np.asarray(a)[0], parameters(config)["layers"]["attention"])
    x = np.random.default_rng(3).normal(size=(2, T, 8)).astype(np.float32)

    @jit
    def both(p, x):
        mixer = layout.kinds(config)[0].mixer
        constants = jax.tree.map(lambda a: a[0], mixer.constants(T))
        out = mixer.apply(
            p, x, Context(masks.causal(), jnp.arange(T)[None], constants=constants)
        ).out
        query, value = (linear("btd,dnh->btnh", x, p[name]) for name in ("query", "value"))
        # eps, 1e-6 of a mean square, is 4e-6 of the sum of four squares
        key = query / jnp.sqrt(jnp.sum(jnp.square(query), axis=-1, keepdims=True) + 4e-6)
        bias = jnp.where(jnp.eye(T, dtype=bool), -1e5, 0.0)[None, None]
        expected = ops.attention(query, key, value, mask=masks.causal(), bias=bias, scale=1.0)
        return out, linear("btnh,nhd->btd", expected, p["out"])

    close(*both(p, x))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("length", "before", "after", "multiple"),
    [(16, 1, 0, 4), (15, 1, 1, 4), (7, 3, 0, 4), (7, 3, 2, 8), (3, 1, 1, 12), (9, 0, 2, 12)],
)
def test_local_chunks_are_a_circle(length, before, after, multiple):
    """A query meets a key once for each turned copy of the chunks that brings it; a shift beyond a
    full turn is none."""
    chunk, rng = 4, np.random.default_rng(length)
    config = replace(
        BASE, positions=None, use_bias=False, mixer=zoo.LocalChunks(chunk, before, after, multiple)
    )
    mixer = config.mixer(config)
    p = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        params.abstract(mixer.spec),
    )
    x = jnp.asarray(rng.normal(size=(1, length, 8)), jnp.float32)
    ours = jit(
        lambda p, x: mixer.apply(p, x, Context(masks.causal(), jnp.arange(length)[None])).out
    )(p, x)

    query, key, value = (
        np.einsum("td,dnh->nth", x[0], p[name]["kernel"]) for name in ("query", "key", "value")
    )
    chunks = -(-length // multiple) * multiple // chunk
    counts = np.zeros((length, length))
    for shift in range(-before, after + 1):
        brought = np.roll(np.arange(chunks), -shift) if abs(shift) <= chunks else np.arange(chunks)
        counts += brought[np.arange(length) // chunk][:, None] == np.arange(length)[None] // chunk
    weights = np.exp(query @ key.swapaxes(1, 2) / 2) * counts * np.tri(length)
    out = weights / weights.sum(-1, keepdims=True) @ value
    # exp of scores of some tens
    close(ours[0], np.einsum("nth,nhd->td", out, p["out"]["kernel"]), 1e-4)
    if (before, after) == (1, 0):  # the mask that says the same
        masked = mixers.attention(config).apply(
            p, x, Context(masks.causal() & masks.chunked(chunk, 1), jnp.arange(length)[None])
        )
        close(ours, masked.out, 1e-4)


# Data that is drawn, and what is refused


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bigbird", "performer", "reformer_full"])
def test_constants_are_drawn_by_layer_and_can_be_replaced(name):
    config = SYSTEMS[name]
    constants = lambda config: jax.tree.map(np.asarray, layout.kinds(config)[0].mixer.constants(T))
    drawn, logits = constants(config), run(config, parameters(config))
    assert all(leaf.shape[0] == L and (leaf[0] != leaf[1]).any() for leaf in jax.tree.leaves(drawn))
    close(run(config, parameters(config), constants=drawn), logits)
    swapped = jax.tree.map(lambda leaf: leaf[::-1], drawn)
    assert np.abs(run(config, parameters(config), constants=swapped) - logits).max() > 1e-3
    other = constants(replace(config, mixer=replace(config.mixer, seed=1)))
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(other), strict=True)
    )


def test_bigbird_layouts():
    config = replace(BASE, mixer=zoo.BigBird(1, 1, "seeded"))
    layouts = layout.kinds(config)[0].mixer.constants(T)
    for layer in range(L):
        np.testing.assert_array_equal(
            layouts[layer], zoo.bigbird.seeded_layout(T, 1, 1, 2, layer, max_length=T)
        )
    zero = layout.kinds(replace(BASE, mixer=zoo.BigBird(2, 3, "zero")))[0].mixer.constants(T)
    assert zero.shape == (L, 2, 6, 3) and not zero.any()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["performer", "reformer"])
def test_what_is_drawn_does_not_depend_on_the_length_of_a_batch(name):
    constants = layout.kinds(SYSTEMS[name])[0].mixer.constants
    np.testing.assert_array_equal(constants(T), constants(2 * T))


@pytest.mark.thorough
def test_reformer_hashes_anew_with_a_dropout_key():
    config = SYSTEMS["reformer"]
    for redraw in (True, False):
        chosen = replace(config, mixer=zoo.Reformer(4, redraw=redraw))
        a, b = (
            run(chosen, parameters(config), dropout_key=jax.random.key(s, impl="unsafe_rbg"))
            for s in (0, 1)
        )
        assert (np.abs(a - b).max() > 1e-3) == redraw


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("reformer", dict(attention_softcap=5.0), "attention_softcap=5.0: Reformer"),
        ("linear", dict(attention_dropout_rate=0.1), "attention_dropout_rate=0.1: Linear"),
        ("efficient", dict(attention_dropout_rate=0.1), "attention_dropout_rate=0.1: Efficient"),
        ("performer", dict(attention_dropout_rate=0.1), "attention_dropout_rate=0.1: Performer"),
        ("reformer", dict(num_kv_heads=1), "num_kv_heads=1: Reformer"),
    ],
)
def test_settings_that_a_system_lacks(name, changes, said):
    with pytest.raises(ConfigError, match=said):
        models.spec(replace(SYSTEMS[name], **changes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["longformer", "bigbird", "linformer", "linear", "efficient", "performer"]
)
def test_masks_and_maps_that_a_system_lacks(name):
    config = replace(SYSTEMS[name], masks=(masks.causal() & masks.window(3),))
    with pytest.raises(NotImplementedError, match=f"(?i){type(config.mixer).__name__}"):
        jax.eval_shape(partial(models.apply, config), parameters(SYSTEMS[name]), TOKENS)
    with pytest.raises(
        NotImplementedError, match=f"{type(config.mixer).__name__} keeps no attention maps"
    ):
        jax.eval_shape(
            partial(models.apply, SYSTEMS[name], intermediates=("layers/*/attention/weights",)),
            parameters(SYSTEMS[name]),
            TOKENS,
        )


# As data

OFFERED = {**NAMES, "": MODEL}


@pytest.mark.parametrize("cls", [c for c in vars(mixers).values() if isinstance(c, type)])
def test_one_option_selects_a_system_and_its_description_says_so(cls):
    config = C.override(BASE, [f"--mixer={cls.__name__}"], OFFERED)
    assert config.mixer == cls() and hash(config) == hash(replace(config))
    assert C.describe(config)["mixer"]["type"] == cls.__name__ and C.fingerprint(
        config
    ) != C.fingerprint(BASE)
    first = fields(cls)[0].name
    assert f"--mixer.{first.replace('_', '-')} " in C.help_text(config, "show")
    if cls is zoo.Longformer:
        config = C.override(config, ["--mixer.window=4", "--mixer.global-tokens", "(1, 5)"])
        assert config.mixer == zoo.Longformer(4, (1, 5))
        assert (
            C.override(BASE, ["--mixer", "Longformer(4, global_tokens=(1, 5))"], OFFERED) == config
        )


@pytest.mark.thorough
def test_local_and_sparse_transformers_are_masks():
    texts = [
        "causal() & window(3)",
        "sparse_transformer_strided(4)",
        "sparse_transformer_fixed(4, 2)",
        "chunked(4) & causal()",
    ]
    config = C.override(BASE, ["--masks", f"({', '.join(texts)})", "--num-layers=4"], OFFERED)
    assert C.describe(config)["masks"] == list(map(str, config.masks))
    name = "layers/*/attention/weights"
    out = jit(partial(models.apply, config, intermediates=(name,)))(parameters(config), TOKENS)
    maps = np.asarray(out.intermediates[name])
    for mask, weights in zip(config.masks, maps, strict=True):
        np.testing.assert_array_equal(
            weights > 0, np.broadcast_to(mask.dense(T, T), weights.shape), str(mask)
        )


# Training


@pytest.mark.thorough
def test_a_linformer_learns_to_reverse():
    config = replace(BASE, num_layers=1, d_model=32, mixer=zoo.Linformer(T))
    optimizer = optax.adam(1e-2)

    def loss(p, tokens):
        logits = models.apply(config, p, tokens).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ::-1]).mean()

    @jit
    def train(p, batches):
        def step(carry, tokens):
            p, state = carry
            value, gradients = jax.value_and_grad(loss)(p, tokens)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(p, updates), state), value

        return jax.lax.scan(step, (p, optimizer.init(p)), batches)[1]

    batches = jnp.asarray(np.random.default_rng(0).integers(0, V, (150, 32, T)))
    losses = np.asarray(
        train(jax.tree.map(lambda a: np.asarray(a) / 5, parameters(config)), batches)
    )
    assert losses[0] > 0.9 * np.log(V) and losses[-10:].mean() < 0.5 * np.log(V), losses[::10]


def mixer_with_everything(config):
    """A small mixer with parameters, what layers share, constants, its layer's number, its mask and
    dropout."""
    matrix = Spec((8, 8), ("embed", "embed_out"), jax.nn.initializers.normal(), ("embed",))

    def apply(p, x, context):
        total = jnp.cumsum(ops.einsum("btd,de->bte", x, p["kernel"]), axis=1) * context.constants
        out = jnp.tanh(ops.einsum("btd,de->bte", total, context.shared["kernel"])) + context.layer
        seen = context.mask.dense(T, T)[0, 0].sum(1)[None, :, None]
        return MixerOutput(ops.dropout(out, 0.3, context.dropout_key) * seen)

    return Mixer(
        {"kernel": matrix}, apply, lambda *_: {}, {"kernel": matrix}, lambda T: 1.0 + jnp.arange(L)
    )


@pytest.mark.thorough
def test_reversible_layers_have_the_gradients_of_plain_ones(monkeypatch):
    """In the parameters that all layers share, too; dropout falls where it fell when layers are
    recomputed."""
    key = jax.random.key(4, impl="unsafe_rbg")  # whose bits compile fast

    def plain(f, g, params, x1, x2, *extra):
        for i in range(L):
            turn = i % len(f)
            layer = jax.tree.map(lambda a, i=i: a[i // len(f)], params[turn])
            x1 = x1 + f[turn](layer, x2, *extra)
            x2 = x2 + g[turn](layer, x1, *extra)
        return x1, x2

    with jax.enable_x64(True):
        config = replace(
            BASE,
            mixer=mixer_with_everything,
            masks=CAUSAL,
            dropout_rate=0.2,
            stack=zoo.Reversible(),
        )
        p = jax.tree.map(lambda a: jnp.asarray(np.float64(a)), parameters(config))

        def gradient(p):
            def loss(p):
                hidden = models.encode(config, p, TOKENS, dropout_key=key).hidden
                return jnp.sum(jnp.sin(hidden)), hidden

            return jit(jax.grad(loss, has_aux=True))(p)

        ours = gradient(p)
        monkeypatch.setattr(reversible, "reversible_stack", plain)
        # float64, streams that come back through four subtractions
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, gradient(p)
        )


@pytest.mark.thorough
def test_reversible_layers_take_a_reformer_and_refuse_by_name():
    config = replace(SYSTEMS["reformer"], stack=zoo.Reversible())
    encode = partial(models.encode, config, dropout_key=jax.random.key(0))
    assert jax.eval_shape(encode, parameters(config), TOKENS).hidden.shape == (2, T, 8)
    with pytest.raises(ConfigError, match="block=post_norm"):
        post = replace(config, block=blocks.post_norm)
        models.encode(post, parameters(post), TOKENS)
    with pytest.raises(NotImplementedError, match="intermediates"):
        models.encode(
            config, parameters(config), TOKENS, intermediates=("layers/*/attention/weights",)
        )


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", [zoo.Longformer(4, 1), zoo.BigBird(2, 1, "zero")])
def test_blocks_and_global_tokens_of_a_row_serve_one_segment(mixer):
    """Those of a second one would be elsewhere than where it stands alone."""
    config, ids = (
        replace(BASE, mixer=mixer),
        np.array([[1] * 5 + [2] * (T - 5), [0] * 2 + [1] * (T - 5) + [0] * 3]),
    )
    found = run(config, parameters(config), TOKENS, ids)
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


@pytest.mark.thorough
def test_longformers_packed_with_flags_equal_those_alone():
    config = replace(BASE, mixer=zoo.Longformer(4, None, max_globals=T))
    p, ids = parameters(config), np.array([[1] * 5 + [2] * (T - 5)] * 2)
    flags = jnp.asarray(np.arange(T)[None] % 5 == np.zeros((2, 1)))  # 0 and 5 begin a segment
    packed = run(config, p, TOKENS, ids, inputs={"global_tokens": flags})
    for part in (slice(0, 5), slice(5, T)):
        alone = run(
            config, p, TOKENS[:, part], ONES[:, part], inputs={"global_tokens": flags[:, part]}
        )
        close(packed[:, part], alone)


@pytest.mark.thorough
def test_bigbird_is_dense_where_it_is_short():
    """Up to `dense_length`; beyond it, and by default, the layout's blocks."""
    dense, p = replace(BASE, mixer=None), parameters(BASE)
    for length, bird in (
        (T, zoo.BigBird(2, 1, "zero", dense_length=T)),
        (T - 1, zoo.BigBird(2, 1, "zero", dense_length=T)),
    ):
        ids = ONES[:, :length].copy()
        ids[1, :3] = 0
        close(
            run(replace(BASE, mixer=bird), p, TOKENS[:, :length], ids)[ids > 0],
            run(dense, p, TOKENS[:, :length], ids)[ids > 0],
        )
    sparse = run(replace(BASE, mixer=zoo.BigBird(2, 1, "zero")), p)
    close(run(replace(BASE, mixer=zoo.BigBird(2, 1, "zero", dense_length=T - 1)), p), sparse)
    assert np.abs(sparse - run(dense, p)).max() > 0.1


@pytest.mark.thorough
def test_longformers_of_other_windows_take_turns():
    """Without global tokens they are bands of two widths."""
    longformer = replace(BASE, mixer=tuple(zoo.Longformer(window, 0) for window in (2, 6)))
    bands = replace(BASE, masks=tuple(masks.window(half, half) for half in (1, 3)))
    p = parameters(longformer)
    attention = {
        name: leaf
        for name, leaf in p["layers"]["attention"].items()
        if not name.startswith("global_")
    }
    close(run(longformer, p), run(bands, p | {"layers": p["layers"] | {"attention": attention}}))


@pytest.mark.thorough
def test_longformer_asks_for_its_global_tokens():
    config = replace(BASE, mixer=zoo.Longformer(4, None))
    p, flags = parameters(config), np.arange(T)[None] < np.array([[2], [2]])
    with pytest.raises(ValueError, match="global_tokens"):
        models.apply(config, p, TOKENS)
    found = models.apply(config, p, TOKENS, inputs={"global_tokens": flags}).logits
    close(found, run(replace(BASE, mixer=zoo.Longformer(4, 2)), p))


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", [zoo.Longformer(4, 1), zoo.BigBird(2, 1, "zero")])
def test_a_padded_slot_of_sparse_attention_sees_nothing(mixer):
    """Also where a head pools it (`position_0`), and padding of dense attention sees the row: so
    are theirs."""
    config = replace(BASE, mixer=mixer, heads=(models.Classification(3, pool="position_0"),))
    p, ids = parameters(config), ONES.copy()
    ids[:, :2] = 0
    others = TOKENS.at[:, 2:].add(1) % V
    np.testing.assert_array_equal(run(config, p, TOKENS, ids), run(config, p, others, ids))
    assert np.abs(run(config, p) - run(config, p, others)).max() > 1e-3


def test_a_mixer_of_ones_own_may_be_scored_as_another():
    @dataclass(frozen=True)
    class Noisy:
        noise: float = 0.1

        def __call__(self, config):
            return mixers.attention(config)

        def evaluation(self):
            return replace(self, noise=0.0)

    kinds = Noisy(), zoo.Reformer(chunk=4)
    config = ModelConfig(
        vocab_size=8, num_layers=2, d_model=8, num_heads=2, context_length=8, mixer=kinds
    )
    assert models.evaluation(config).mixer == (Noisy(0.0), zoo.Reformer(chunk=4, redraw=False))
