"""SigLIP: the heads of its two towers. The image's is an attention of one trained query.

Zhai et al. 2023, arXiv:2303.15343. The pooling is that of Zhai et al. 2021, arXiv:2106.04560,
section 3.3, after the Set Transformer: Lee et al. 2018, arXiv:1810.00825, section 3.2.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, xavier_uniform
from jaxtyping import Float

from jaxformer import ops, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import segments
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feedforward, feedforward_spec
from jaxformer.models.heads import Head
from jaxformer.models.layer import linear
from jaxformer.models.mixers.attention import attention_spec
from jaxformer.models.norm import norm, norm_spec
from jaxformer.params import Spec, Tree

Features = Float[Array, "B D"]


@dataclass(frozen=True)
class AttentionPooling:
    """A head: y + mlp(norm(y)), where y is the attention of one trained query to all positions.

    Heads, activation and norm are those of the config. Padding is not seen. Raises ConfigError for
    a feed-forward that is no single activation or gate.
    """

    name: str = "pooled"  # key of its parameters and of its output

    def __call__(self, config: ModelConfig) -> Head:
        if not isinstance(config.feedforward, str):
            raise ConfigError(
                f"model.heads: {self} needs an activation or a gate by its name as "
                f"model.feedforward; got {config.feedforward}"
            )
        activation: str = config.feedforward
        maps = attention_spec(config)
        probe = Spec((config.d_model,), ("embed",), row_init)
        spec = maps | {
            "probe": probe,
            "norm": norm_spec(config),
            "feedforward": feedforward_spec(config),
        }

        def apply(params: Tree, hidden: Float[Array, "B T D"], padding_mask, inputs) -> Features:
            shape = len(hidden), 1, config.d_model
            query = jnp.broadcast_to(params["probe"].astype(hidden.dtype)[None, None], shape)
            query = linear("btd,dnh->btnh", query, params["query"])
            key = linear("btd,dnh->btnh", hidden, params["key"])
            value = linear("btd,dnh->btnh", hidden, params["value"])
            mask = None
            if padding_mask is not None:
                mask = segments(jnp.ones((len(hidden), 1), int), padding_mask.astype(int))
            pooled: Any = ops.attention(query, key, value, mask=mask, scale=config.score_scale)
            y = linear("btnh,nhd->btd", pooled, params["out"])
            normed = norm(config, params["norm"], y)
            y = y + feedforward(activation, params["feedforward"], normed)
            return y[:, 0].astype(jnp.promote_types(y.dtype, jnp.float32))

        return Head(self.name, spec, apply)


def row_init(key: Array, shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """The initial values of a vector, drawn like a matrix of one line."""
    return xavier_uniform()(key, (1, *shape), dtype)[0]


@dataclass(frozen=True)
class LastPosition:
    """A head: a linear map with a bias of the last position, which counts even if it is padding.

    SigLIP pads every text to the same length, and reads the last position.
    """

    width: int | None = None  # None: that of the model
    name: str = "pooled"  # key of its parameters and of its output

    reads_padding = True  # no field

    def __post_init__(self):
        check_numbers("LastPosition.", self, width=1)

    def __call__(self, config: ModelConfig) -> Head:
        D = config.hidden_width
        shape = D, self.width or D
        spec = params.linear(shape, ("embed", None), ("embed",), normal(config.std), True)

        def apply(params: Tree, hidden: Float[Array, "B T D"], *_) -> Float[Array, "B C"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            return linear("bd,dc->bc", hidden[:, -1], params, wide)

        return Head(self.name, spec, apply)
