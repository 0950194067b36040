"""FAVOR+: random features whose products have the mean exp(q . k / sqrt(H)).

Choromanski et al. 2021, arXiv:2009.14794.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.presets import bert_base_encoder
from jaxformer.ops.attention.call import check_shapes
from jaxformer.ops.einsum import einsum, in_float32
from jaxformer.zoo import linear_attention
from jaxformer.zoo.frame import by_layer
from jaxformer.zoo.linear_attention import recurrent
from jaxformer.zoo.visible import visibility


@jax.named_scope("favor_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    projection: Float[Array, "M H"],
    *,
    mask: Mask | None = None,
    stabiliser: float | Float[Array, "#B 1 #K 1"] | None = None,
    eps: float = 1e-6,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """softmax(q k^T / sqrt(H)) v with an error of O(1/sqrt(M)). Choromanski et al. 2021, eq. 5-7.

    It is `linear_attention.attention` with `favor_features`. `projection` is data: see
    `orthogonal_projection`. The variance grows with exp(|q|^2 / sqrt(H)).

    The `stabiliser` of the keys is by default the largest exponent of its row and head. It cancels,
    except in `eps` and where float32 underflows. Under `causal()` that maximum would show later
    tokens, so the default is 0.0, which suffices while |k|^2 / sqrt(H) stays below 100.
    """
    check_shapes("favor_attention", query, key, value)
    if stabiliser is None:
        view = visibility(mask, query.shape[1], key.shape[1], "favor_attention")
        shown = view.keys[..., None, None]
        products = jax.lax.stop_gradient(_project(in_float32(key), projection))
        top = jnp.max(products, axis=(1, 3), keepdims=True, where=shown, initial=-jnp.inf)
        stabiliser = 0.0 if view.causal else jnp.where(jnp.isfinite(top), top, 0)
    of_query = partial(favor_features, projection=projection, eps=eps)
    of_key = partial(of_query, stabiliser=stabiliser)
    return linear_attention.attention(
        query, key, value, mask=mask, feature_map=(of_query, of_key), eps=0.0, chunk=chunk
    )


def favor_features(
    x: Float[Array, "B T N H"],
    projection: Float[Array, "M H"],
    *,
    stabiliser: float | Float[Array, "#B #T #N 1"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, "B T N M"]:
    """(exp(P z - |z|^2 / 2 - stabiliser) + eps) / sqrt(M) with z = x / H^(1/4).

    Choromanski et al. 2021, lemma 1. phi(q) . phi(k) has the mean exp(q . k / sqrt(H)), up to the
    factors exp(-stabiliser), which cancel in attention. The default stabiliser is each token's
    largest exponent, which is right for queries; keys must share one. `eps` is that of the authors'
    code.
    """
    products = _project(x, projection)
    if stabiliser is None:
        stabiliser = jax.lax.stop_gradient(jnp.max(products, axis=-1, keepdims=True))
    norm = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / (2 * x.shape[-1] ** 0.5)
    return projection.shape[0] ** -0.5 * (jnp.exp(products - norm - stabiliser) + eps)


def favor_relu_features(
    x: Float[Array, "B T N H"], projection: Float[Array, "M H"], eps=1e-3
) -> Float[Array, "B T N M"]:
    """max(P z, 0) + eps with z = x / H^(1/4).

    As a `feature_map` of `linear_attention` it gives the ReLU kernel of Choromanski et al. 2021,
    sec. 4.
    """
    return jax.nn.relu(_project(x, projection)) + eps


def _project(x, projection):
    """P z with z = x / H^(1/4)."""
    return einsum("btnh,mh->btnm", x * x.shape[-1] ** -0.25, projection)


def orthogonal_projection(
    key: Array, features: int, width: int, dtype: Any = jnp.float32
) -> Float[Array, "features width"]:
    """Unbiased Gaussian rows that are orthogonal in blocks of `width` rows.

    Choromanski et al. 2021, sec. 2.4 and 3.
    """
    directions, lengths = jax.random.split(key)
    # Haar distributed, unlike those of public Performers, whose error stops falling near 4e-3
    blocks = jax.random.orthogonal(directions, width, (-(-features // width),), dtype)
    vectors = blocks.reshape(-1, width)[:features]
    gaussian = jax.random.normal(lengths, vectors.shape, dtype)
    return vectors * jnp.linalg.norm(gaussian, axis=1, keepdims=True)


@dataclass(frozen=True)
class Performer:
    """FAVOR+, random features of the softmax or ReLU kernel: Choromanski et al. 2021.

    arXiv:2009.14794. Masks: full(), or causal(), which decodes.
    `apply(..., constants=directions [L, features, H])` replaces those drawn from `seed`. The
    stabiliser of keys is 0, so a prefix and its continuation have the same one; exponents stay
    below about H / 2.
    """

    features: int = 256  # random directions
    kernel: Literal["softmax", "relu"] = "softmax"  # what the features approximate
    seed: int = 0  # of the directions
    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(features=1, seed=0, chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        def draw(key):
            return orthogonal_projection(key, self.features, config.head_size)

        def maps(context):
            if self.kernel == "relu":
                return (partial(favor_relu_features, projection=context.constants),) * 2
            of_query = partial(favor_features, projection=context.constants)
            return of_query, partial(of_query, stabiliser=0.0)

        mixer = recurrent(self, config, maps, 0.0, self.features)
        return mixer._replace(constants=lambda T: by_layer(self.seed, config.num_layers, draw))


# Choromanski et al. 2021, arXiv:2009.14794: BERT's base with 256 random features
performer_base = replace(bert_base_encoder, mixer=Performer(256), attention_dropout_rate=0.0)
