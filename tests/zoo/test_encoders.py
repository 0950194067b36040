"""The ideas of ALBERT, ModernBERT and DeBERTa against explicit formulas."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full
from jaxformer.models import Embedding, LanguageModel, ModelConfig
from jaxformer.models.blocks import post_norm
from jaxformer.models.layer import Context
from jaxformer.ops.positions import Rope
from jaxformer.zoo.disentangled import log_buckets

T = 9
BERT = ModelConfig(
    vocab_size=13,
    num_layers=4,
    d_model=12,
    num_heads=2,
    context_length=T,
    block=post_norm,
    masks=(full(),),
    embedding=Embedding(norm=True),
)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 13, (2, T)), jnp.int32)
CLOSE = dict(rtol=1e-4, atol=2e-5)  # float32 through a few layers


def random(config):
    """Parameters of order one."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        return jnp.float32((path[-1].key == "scale") + 0.4 * rng.normal(size=leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, models.spec(config))


@pytest.mark.thorough
@pytest.mark.parametrize("layers,times", [(1, (3,)), (2, (2,)), (4, (2, 1)), (2, (0, 3))])
def test_repeated_layers_are_a_deep_stack_of_equal_layers(layers, times):
    shared = replace(BERT, num_layers=layers, stack=zoo.Repeated(times))
    tree = random(shared)
    size = layers // len(times)
    order = [
        group * size + k
        for group, count in enumerate(times)
        for _ in range(count)
        for k in range(size)
    ]
    deep = replace(BERT, num_layers=len(order))
    copied = tree | {"layers": jax.tree.map(lambda leaf: leaf[jnp.array(order)], tree["layers"])}
    found = models.apply(shared, tree, TOKENS).logits
    np.testing.assert_allclose(found, models.apply(deep, copied, TOKENS).logits, **CLOSE)


@pytest.mark.thorough
def test_repeated_layers_drop_anew_each_time():
    config = replace(BERT, num_layers=1, stack=zoo.Repeated((2,)), dropout_rate=0.5)
    tree = random(config)

    def drawn(number):
        return models.apply(config, tree, TOKENS, dropout_key=jax.random.key(number)).hidden

    np.testing.assert_array_equal(drawn(0), drawn(0))
    assert np.abs(drawn(0) - drawn(1)).max() > 0.1


@pytest.mark.thorough
def test_groups_divide_the_layers():
    config = replace(BERT, num_layers=3, stack=zoo.Repeated((1, 1)))
    with pytest.raises(ConfigError, match=r"2 groups of model\.num_layers=3"):
        models.apply(config, random(config), TOKENS)
    for times in ((), (-1,)):
        with pytest.raises(ConfigError, match=r"Repeated\.times"):
            zoo.Repeated(times)
    config = replace(BERT, num_layers=1, stack=zoo.Repeated((2,)))
    with pytest.raises(NotImplementedError, match="each layer runs once"):
        models.apply(config, random(config), TOKENS, intermediates=("layers/*/residual",))


@pytest.mark.thorough
def test_a_narrow_table_is_read_by_the_head():
    head = LanguageModel(zoo.Projection("gelu", 5), bias=True)
    config = replace(BERT, embedding=zoo.Factorised(5, token_types=2), heads=(head,))
    spec = models.spec(config)
    assert (
        spec["embedding"]["tokens"].shape == (13, 5)
        and spec["embedding"]["positions"].shape[1] == 5
    )
    assert spec["embedding"]["projection"]["kernel"].shape == (5, 12)
    tree = random(config)
    output = models.apply(config, tree, TOKENS)
    tree = jax.tree.map(np.asarray, tree)
    transform = tree["heads"]["language_model"]["transform"]
    hidden = np.asarray(output.hidden) @ transform["kernel"] + transform["bias"]
    hidden = np.asarray(jax.nn.gelu(hidden, approximate=False))
    centred = hidden - hidden.mean(-1, keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    normed = normed * transform["norm"]["scale"] + transform["norm"]["bias"]
    logits = normed @ tree["embedding"]["tokens"].T + tree["heads"]["language_model"]["bias"]
    np.testing.assert_allclose(output.logits, logits, **CLOSE)
    untied = models.spec(replace(config, tie_embeddings=False))
    assert untied["heads"]["language_model"]["kernel"].shape == (13, 5)
    for wrong in (LanguageModel(), LanguageModel(zoo.Projection("gelu", 6))):
        with pytest.raises(ConfigError, match=r"which has \(13, 5\)"):
            models.spec(replace(config, heads=(wrong,)))
    with pytest.raises(ConfigError, match=r"Projection\.activation='glue'"):
        zoo.Projection("glue")


MIXERS = {
    "logarithm": zoo.Disentangled(4, 9),
    "own maps": zoo.Disentangled(4, 9, own_maps=True),
    "c2p": zoo.Disentangled(4, 9, ("c2p",), norm=False),
    "p2c": zoo.Disentangled(3, None, ("p2c",), own_maps=True, norm=False),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MIXERS)
def test_disentangled_attention_is_its_equation(name):
    """He et al. 2020, eq. 4, pair by pair in float64."""
    mixer = MIXERS[name]
    config = replace(BERT, positions=None, mixer=mixer)
    tree = random(config)
    shared = jax.tree.map(np.float64, tree["shared"])
    layer = jax.tree.map(lambda leaf: np.float64(leaf[0]), tree["layers"]["attention"])
    x = np.random.default_rng(2).normal(size=(1, T, 12))
    table = shared["relative"]
    if mixer.norm:
        centred = table - table.mean(-1, keepdims=True)
        normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + config.norm_eps)
        table = normed * shared["relative_norm"]["scale"] + shared["relative_norm"]["bias"]

    def mapped(x, name):
        return np.einsum("td,dnh->tnh", x, layer[name]["kernel"]) + layer[name]["bias"]

    query, key, value = (mapped(x[0], name) for name in ("query", "key", "value"))
    prefix = "position_" if mixer.own_maps else ""
    scores = np.zeros((2, T, T))
    for i in range(T):
        for j in range(T):
            distance = np.array(i - j)
            if mixer.max_distance is not None:
                distance = log_buckets(distance, mixer.buckets, mixer.max_distance)
            row = np.clip(distance + mixer.buckets, 0, 2 * mixer.buckets - 1)
            scores[:, i, j] = (query[i] * key[j]).sum(-1)
            if "c2p" in mixer.terms:
                scores[:, i, j] += (query[i] * mapped(table, prefix + "key")[row]).sum(-1)
            if "p2c" in mixer.terms:
                scores[:, i, j] += (key[j] * mapped(table, prefix + "query")[row]).sum(-1)
    weights = np.exp(scores / np.sqrt(6 * (1 + len(mixer.terms))))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, value)
    expected = np.einsum("tnh,nhd->td", out, layer["out"]["kernel"]) + layer["out"]["bias"]
    own = jax.tree.map(lambda leaf: leaf[0], tree["layers"]["attention"])
    context = Context(full(), jnp.arange(T)[None], shared=tree["shared"])
    found = mixer(config).apply(own, jnp.float32(x), context).out
    np.testing.assert_allclose(found[0], expected, **CLOSE)


def test_buckets_are_even_and_then_by_the_logarithm():
    distance = np.arange(-600, 601)
    buckets = log_buckets(distance, 256, 512)
    np.testing.assert_array_equal(buckets, -buckets[::-1])
    near = np.abs(distance) <= 128
    np.testing.assert_array_equal(buckets[near], distance[near])
    assert buckets[distance == 511] == 255 and (np.diff(buckets) >= 0).all()


def test_what_disentangled_attention_refuses():
    for options, said in (
        (dict(buckets=1), "buckets"),
        (dict(terms=()), "terms"),
        (dict(terms=("p2c", "c2p")), "terms"),
        (dict(buckets=16, max_distance=9), "max_distance=9"),
    ):
        with pytest.raises(ConfigError, match=said):
            zoo.Disentangled(**options)
    for changes, said in (
        (dict(num_kv_heads=1), "num_kv_heads=1"),
        (dict(positions=Rope()), "model.positions"),
    ):
        with pytest.raises(ConfigError, match=said):
            models.spec(replace(BERT, mixer=zoo.Disentangled(), **changes))


def test_the_first_layer_of_modernbert_has_no_norm_of_attention():
    tiny = dict(vocab_size=11, num_layers=4, d_model=12, num_heads=2, d_ff=9)
    config = replace(zoo.PRESETS["modernbert_base"], **tiny, block=zoo.modernbert.bare_first(4))
    layers = params.paths(models.spec(config)["layers"])
    norms = {path for path in layers if path.endswith("attention_norm/scale")}
    assert norms == {"1/attention_norm/scale"} and layers["1/attention_norm/scale"].shape == (3, 12)
    assert "0/feedforward_norm/scale" in layers


def beside_first(**options):
    """A model with a convolution beside the first of its two layers."""
    block = (zoo.PostNormConvolution(**options), post_norm)
    mixer = zoo.Disentangled(4, 9)
    return replace(BERT, num_layers=2, positions=None, mixer=mixer, block=block)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, dict(width=5, groups=3, activation="gelu"), dict(width=1)])
def test_a_convolution_beside_the_first_layer_is_its_sum(options):
    """Output by output in float64; neighbours in another segment, or in padding, count as zero."""
    config = beside_first(**options)
    part, _ = config.block
    tree = random(config)
    ids = jnp.array([[1] * 4 + [2] * 3 + [0] * 2, [0] + [1] * 8])
    run = dict(segment_ids=ids, intermediates=("embedding", "layers/*/residual"))
    found = models.apply(config, tree, TOKENS, **run).intermediates
    own = tree["layers"]["0"]
    without = {name: leaf for name, leaf in own.items() if "convolution" not in name}
    plain = replace(config, num_layers=1, block=post_norm)
    layer = models.apply(plain, tree | {"layers": without}, TOKENS, **run)
    x = np.float64(found["embedding"])
    kernel, bias = (np.float64(own["convolution"][name][0]) for name in ("kernel", "bias"))
    inputs, outputs = 12 // part.groups, 12 // part.groups
    summed = np.zeros(x.shape) + bias
    for b, t, j, o in np.ndindex(2, T, part.width, 12):
        s = t + j - part.width // 2
        if 0 <= s < T and ids[b, t] == ids[b, s] != 0:
            first = o // outputs * inputs
            summed[b, t, o] += x[b, s, first : first + inputs] @ kernel[:, j, o]
    activation = jnp.tanh if part.activation == "tanh" else jax.nn.gelu
    extra = {} if part.activation == "tanh" else {"approximate": False}
    y = np.float64(layer.intermediates["layers/*/residual"][0])
    y = y + np.float64(activation(jnp.float32(summed), **extra))
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + config.norm_eps)
    norm = jax.tree.map(np.asarray, own["convolution_norm"])
    y = y * norm["scale"][0] + norm["bias"][0]
    real = np.asarray(ids) != 0
    np.testing.assert_allclose(found["layers/*/residual"][0][real], y[real], **CLOSE)


@pytest.mark.thorough
def test_a_packed_row_is_computed_as_its_segments_alone():
    config = beside_first()
    tree = random(config)
    ids = jnp.array([[1] * 4 + [2] * 5] * 2)
    packed = models.apply(config, tree, TOKENS, segment_ids=ids).logits
    for part in (slice(0, 4), slice(4, 9)):
        alone = models.apply(config, tree, TOKENS[:, part]).logits
        np.testing.assert_allclose(packed[:, part], alone, **CLOSE)


@pytest.mark.thorough
def test_a_convolution_drops_its_output_and_has_a_gradient():
    config = replace(beside_first(), dropout_rate=0.5)
    tree = random(config)

    def hidden(tree, key=None):
        return models.apply(config, tree, TOKENS, dropout_key=key).hidden

    key = jax.random.key(0)
    np.testing.assert_array_equal(hidden(tree, key), hidden(tree, key))
    assert np.abs(hidden(tree, key) - hidden(tree)).max() > 0.1
    gradient = jax.grad(lambda tree: jnp.sum(jnp.square(hidden(tree)[..., 0])))(tree)
    assert np.abs(gradient["layers"]["0"]["convolution"]["kernel"]).max() > 1e-3


@pytest.mark.thorough
def test_what_a_convolution_refuses():
    for options in (dict(width=2), dict(width=0), dict(groups=0), dict(activation="glue")):
        with pytest.raises(ConfigError, match=rf"PostNormConvolution\.{next(iter(options))}"):
            zoo.PostNormConvolution(**options)
    with pytest.raises(ConfigError, match=r"groups=5 does not divide model\.d_model=12"):
        models.spec(beside_first(groups=5))
    config = replace(beside_first(), masks=(causal(),))
    with pytest.raises(NotImplementedError, match="PostNormConvolution"):
        models.apply(config, random(config), TOKENS)
