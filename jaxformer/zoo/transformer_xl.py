"""The relative positions of Transformer-XL: Dai et al. 2019, arXiv:1901.02860, section 3.3.

Gopher (Rae et al. 2021, arXiv:2112.11446) and Chinchilla (Hoffmann et al. 2022, arXiv:2203.15556)
have them. The memory of earlier segments, the paper's other idea, is not here.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int

from jaxformer import ops, params
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, rules
from jaxformer.models.config import Axial, Learned, ModelConfig, Sinusoidal
from jaxformer.models.layer import Context, Mixer, Tree, linear
from jaxformer.models.mixers.attention import attention
from jaxformer.models.presets import sized
from jaxformer.ops.einsum import einsum
from jaxformer.ops.positions import sinusoidal
from jaxformer.params import Spec


def relative_attention(config: ModelConfig) -> Mixer:
    """Attention with scores ((q_i + u) . k_j + (q_i + v) . W R_{i-j}) / sqrt(H).

    R_d is the sinusoid of the distance d, W a map `[D, N, H]`, and u and v vectors `[N, H]` of the
    layer. Dai et al. 2019, section 3.3. Distances are those of indices, not of `positions`. Raises
    ConfigError for positions that act inside attention, and NotImplementedError for a mask that is
    not `causal()` or an `&` with it.
    """
    if not isinstance(config.positions, Learned | Sinusoidal | Axial | None):
        raise ConfigError(
            f"model.positions={config.positions}: attention of Transformer-XL has its own; "
            "give None"
        )
    N, H = config.num_heads, config.head_size
    start = normal(config.std)
    axes = "embed", "heads", "head"
    vector = Spec((N, H), ("heads", "head"), start)
    extra = {
        "position": params.linear((config.d_model, N, H), axes, ("embed",), start, bias=False),
        "content_vector": vector,
        "position_vector": vector,
    }
    return attention(config, extra=extra, attend=partial(attend, config))


def attend(
    config: ModelConfig,
    tree: Tree,
    context: Context,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    **options,
) -> Array | tuple[Array, Array]:
    """`ops.attention` of queries with the vector u; the term of the positions is its bias."""
    check_causal(options["mask"])
    S = key.shape[1]
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    of_queries, of_keys = options.get("positions") or (
        jnp.arange(query.shape[1])[None],
        jnp.arange(S)[None],
    )
    # the mask hides keys behind the query, and no visible key is S positions away
    distances = jnp.clip(of_queries[:, :, None] - of_keys[:, None, :], 0, S - 1)
    sinusoids = sinusoidal(jnp.arange(S)[None], config.d_model, "half")
    rows = linear("rd,dnh->rnh", sinusoids[0].astype(query.dtype), tree["position"])
    with_content, with_position = (
        query + tree[name].astype(query.dtype)[None, None]
        for name in ("content_vector", "position_vector")
    )
    bias = pick(with_position, rows, distances) * scale
    return ops.attention(with_content, key, value, **options | {"scale": scale, "bias": bias})


def pick(
    query: Float[Array, "B T N H"],
    rows: Float[Array, "R N H"],
    distances: Int[Array, "#B T S"],
) -> Float[Array, "B N T S"]:
    """query_t . rows[distances[t, s]] for each head."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    products = einsum("btnh,rnh->bntr", query, rows, dtype=wide)
    index = jnp.broadcast_to(distances[:, None], (*products.shape[:3], distances.shape[2]))
    return jnp.take_along_axis(products, index, axis=3)


def check_causal(mask: Mask) -> None:
    """Raises NotImplementedError unless the mask hides later keys by its rule `causal`."""
    if not any(part.rule is rules.causal for part in mask.conjuncts()):
        raise NotImplementedError(
            f"attention of Transformer-XL: mask={mask}: it has distances to earlier keys alone; "
            "give causal(), or another mask & causal()"
        )


# Hoffmann et al. 2022, table 4; Rae et al. 2021, table 1: GPT-2 with RMSNorm, 32,000 tokens, and
# these positions. Without W, the model of "70B" would have 64.7 billion parameters; it has 70.06,
# and Gopher 279.7. The papers do not say which maps have biases. With those of the output and of
# the feed-forward, 49 of the 50 counts in Hoffmann et al.'s table A9 come out to the printed
# million; the other one is 2,979.48 where 2,980 is printed. The papers do not name the activation
# either: it is GPT-2's here.
chinchilla_70b = ModelConfig(
    vocab_size=32_000,
    num_layers=80,
    d_model=8192,
    num_heads=64,
    head_width=128,
    context_length=2048,
    norm="rms_norm",
    positions=None,
    mixer=relative_attention,
    use_bias="out|up|down",
)
gopher_280b = sized(chinchilla_70b, 80, 16_384, 128)
