"""Positions that every attention adds to queries and keys: against loops in float64, in a cache,
packed, and in a pair."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import (
    AttentionPositions,
    Axial,
    EncoderDecoder,
    Learned,
    ModelConfig,
    Sinusoidal,
)
from jaxformer.models.layer import LayerOutput
from jaxformer.models.norm import no_norm, norm
from jaxformer.models.position_table import PositionTable
from jaxformer.models.stacks import layout
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.params import Spec
from tests.decoding.test_cache import SCHEDULES, decode

V, B, T, S, D, N = 19, 3, 12, 7, 16, 4
TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
SOURCE = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, S)), jnp.int32)
# float32 sums of numbers of order one, two layers deep
FLOAT32 = dict(rtol=2e-5, atol=2e-5)


def waves(config: ModelConfig) -> PositionTable:
    """A table of one's own: sines of trained rates."""
    return PositionTable(
        {"rates": Spec((config.d_model,), (None,), jax.nn.initializers.normal(1.0))},
        lambda params, positions: jnp.sin(
            jnp.einsum("...t,d->...td", positions.astype(jnp.float32), params["rates"])
        ),
    )


TABLES = {
    "learned": Learned(1),
    "sinusoidal": Sinusoidal(),
    "axial": Axial((4, 8), (6, 10)),
    "of one's own": waves,
}
MODEL = ModelConfig(
    V,
    2,
    D,
    N,
    32,
    d_ff=8,
    feedforward="relu",
    use_bias=False,
    init_std=0.4,
    positions=AttentionPositions(Learned()),
)


def model(name):
    return replace(MODEL, positions=AttentionPositions(TABLES[name]))


def drawn(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.float32(0.5 * rng.normal(size=leaf.shape)), models.spec(config)
    )


def float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def attend(params, queries, keys, values, visible):
    """Softmax attention of [T, D] to [S, D] by NumPy."""
    query, key, value = (
        np.einsum("td,dnh->tnh", x, params[name]["kernel"])
        for x, name in ((queries, "query"), (keys, "key"), (values, "value"))
    )
    scores = np.where(
        visible[None], np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[-1]), -np.inf
    )
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum(
        "tnh,nhd->td", np.einsum("nts,snh->tnh", weights, value), params["out"]["kernel"]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", TABLES)
def test_queries_and_keys_have_positions_and_values_have_none(name):
    """One layer without norms and with a feed-forward of zeros, in float64."""
    config = replace(model(name), num_layers=1, norm=no_norm)
    params = drawn(config)
    params["layers"]["feedforward"] = jax.tree.map(jnp.zeros_like, params["layers"]["feedforward"])
    found = models.apply(config, params, jnp.asarray(TOKENS)).hidden
    exact, shared = float64(params), params.get("shared", {}).get("positions", {})
    layer = jax.tree.map(lambda leaf: leaf[0], exact["layers"]["attention"])
    if name == "of one's own":
        added = np.asarray(waves(config).apply(shared, jnp.arange(T)), np.float64)
    elif name == "learned":
        added = np.asarray(shared, np.float64)[1 : T + 1]
    elif name == "axial":
        lines, columns = np.divmod(np.arange(T), 8)
        added = np.concatenate(
            [float64(shared)["lines"][lines], float64(shared)["columns"][columns]], axis=1
        )
    else:
        rates = 10_000.0 ** (-np.arange(0, D, 2) / D)
        angles = np.arange(T)[:, None] * rates
        added = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(T, D)
    for row in range(B):
        x = exact["embedding"]["tokens"][TOKENS[row]]
        expected = x + attend(layer, x + added, x + added, x, np.tri(T, dtype=bool))
        np.testing.assert_allclose(found[row], expected, **FLOAT32)


@pytest.mark.thorough
def test_a_cross_attention_adds_the_decoders_to_queries_and_the_encoders_to_keys():
    encoder = replace(
        model("of one's own"), num_layers=1, norm=no_norm, masks=(masks.full(),), heads=()
    )
    pair = EncoderDecoder(encoder, replace(model("learned"), num_layers=1, norm=no_norm))
    params = drawn(pair)
    for stack in ("encoder", "decoder"):
        layers = params[stack]["layers"]
        layers["feedforward"] = jax.tree.map(jnp.zeros_like, layers["feedforward"])
    params["decoder"]["layers"]["attention"] = jax.tree.map(
        jnp.zeros_like, params["decoder"]["layers"]["attention"]
    )
    found = models.apply(pair, params, jnp.asarray(TOKENS), source=SOURCE)
    exact = float64(params)
    layer = jax.tree.map(lambda leaf: leaf[0], exact["decoder"]["layers"]["cross_attention"])
    to_keys = np.asarray(
        waves(encoder).apply(params["encoder"]["shared"]["positions"], jnp.arange(S)), np.float64
    )
    to_queries = exact["decoder"]["shared"]["positions"][1 : T + 1]
    for row in range(B):
        x, encoded = (
            exact["decoder"]["embedding"]["tokens"][TOKENS[row]],
            np.asarray(found.source[row], np.float64),
        )
        expected = x + attend(
            layer, x + to_queries, encoded + to_keys, encoded, np.ones((T, S), bool)
        )
        np.testing.assert_allclose(found.hidden[row], expected, **FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["learned", pytest.param("pair", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("schedule", ["prompt", pytest.param("ragged", marks=pytest.mark.thorough)])
def test_a_cache_gives_the_forward_pass(name, schedule):
    config = model("learned")
    if name == "pair":
        config = EncoderDecoder(
            replace(model("sinusoidal"), masks=(masks.full(),), heads=()), config
        )
    options = {"source": SOURCE} if name == "pair" else {}
    params = drawn(config)
    whole = np.asarray(models.apply(config, params, jnp.asarray(TOKENS), **options).logits)
    for row, expected in zip(decode(config, SCHEDULES[schedule], params), whole, strict=True):
        np.testing.assert_allclose(
            row, expected[: len(row)], rtol=1e-5, atol=1e-5 * np.abs(whole).max()
        )


@pytest.mark.thorough
def test_packed_texts_are_the_texts_alone():
    config, lengths = model("of one's own"), (5, 7)
    params = drawn(config)
    ids = jnp.asarray([[1] * 5 + [2] * 7] * B)
    packed = models.apply(config, params, jnp.asarray(TOKENS), segment_ids=ids).logits
    first, second = (
        models.apply(config, params, jnp.asarray(part)).logits
        for part in np.split(TOKENS, lengths[:1], axis=1)
    )
    np.testing.assert_allclose(packed, jnp.concatenate([first, second], axis=1), **FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [dict(unroll=1), dict(remat="full"), dict(attention_implementation="blockwise")]
)
def test_the_gradient_of_the_table_is_that_of_one_layer_after_another(options):
    config = replace(model("learned"), num_layers=3)
    params = drawn(config)

    def gradient(config):
        def loss(params):
            return jnp.mean(jnp.square(models.apply(config, params, jnp.asarray(TOKENS)).logits))

        return jax.grad(loss)(params)["shared"]["positions"]

    expected = gradient(replace(config, unroll=3))
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_allclose(
        gradient(replace(config, **options)),
        expected,
        rtol=1e-4,
        atol=1e-5 * np.abs(expected).max(),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pipeline", "reversible"])
def test_another_stack_has_the_same_positions(name):
    """In a pipeline, and with gradients that are recomputed: as layer after layer under the same
    stack."""
    config = replace(model("learned"), num_layers=4, norm="rms_norm")
    tokens = jnp.asarray(np.tile(TOKENS, (3, 1))[:8])
    params = drawn(config)

    def loss_and_gradient(config):
        def loss(params):
            return jnp.mean(jnp.square(models.apply(config, params, tokens).hidden))

        return jax.jit(jax.value_and_grad(loss))(params)

    if name == "pipeline":
        expected = loss_and_gradient(config)
        with jax.set_mesh(make_mesh(Mesh(data=4, stage=2))):
            found = loss_and_gradient(replace(config, stack=Pipeline()))
    else:
        expected = loss_and_gradient(replace(config, stack=plain_reversible))
        found = loss_and_gradient(replace(config, stack=zoo.Reversible()))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected
    )


def plain_reversible(config, layers, x, context):
    """The streams of `zoo.Reversible`, with gradients by autodiff."""
    stack, y1, y2 = layout.unstacked(config, layers.params), x, x
    (kind,) = layout.kinds(config)
    for number, layer in enumerate(stack):
        context = context.replace(mask=layers.masks[0], layer=number)
        mixer, feedforward = kind.sublayers["attention"], kind.sublayers["feedforward"]
        y1 = (
            y1
            + mixer.apply(layer["attention"], norm(config, layer["attention_norm"], y2), context)[0]
        )
        y2 = (
            y2
            + feedforward.apply(
                layer["feedforward"], norm(config, layer["feedforward_norm"], y1), context
            )[0]
        )
    return (y1 + y2) / 2, LayerOutput()


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"AttentionPositions.table='sines': expected Learned\(\)"
    ):
        AttentionPositions("sines")
    with pytest.raises(ConfigError, match="makes 32 positions of width 17, not 32 of 16"):
        replace(MODEL, positions=AttentionPositions(Axial((4, 8), (7, 10))))
    with pytest.raises(
        ConfigError, match=r"model\.positions=AttentionPositions.*Performer has none"
    ):
        models.spec(replace(MODEL, mixer=zoo.Performer(features=8)))
    with pytest.raises(ConfigError, match="40 tokens do not fit the 32 learned positions"):
        models.apply(MODEL, drawn(MODEL), jnp.zeros((1, 40), jnp.int32))
    assert decoding.init_cache(MODEL, 1, 8) is not None
