"""Experts with biases and a clamped gate, as gpt-oss has them: OpenAI 2025, arXiv:2508.10925.

`ModelConfig(feedforward=ClampedMixture(experts=32, top_k=4), ...)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, residual_std
from jaxformer.ops.einsum import add_bias, einsum, in_float32
from jaxformer.ops.expert_capacity import count_choices
from jaxformer.ops.expert_dispatch import Choices, Experts, local
from jaxformer.ops.mixture import balance_loss, route
from jaxformer.params import Tree, linear
from jaxformer.sharding import auto_axes


def clamped_swiglu(
    gate_up: Float[Array, "*batch F2"], alpha: float = 1.702, limit: float = 7.0
) -> Float[Array, "*batch F"]:
    """(up + 1) gate sigmoid(alpha gate), for gate up to `limit` and up within +-`limit`.

    The even features of `gate_up` are gates, the odd ones are up. OpenAI 2025, arXiv:2508.10925.
    """
    gate = jnp.minimum(gate_up[..., ::2], limit)
    up = jnp.clip(gate_up[..., 1::2], -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


class Routed(NamedTuple):
    """What `clamped_mixture` returns. The figures do not count padding."""

    out: Any  # [B, T, D]
    fraction: Any  # [E], the choices of each expert per token; the sum is top_k
    probability: Any  # [E], the mean of the softmax over all experts


def _specs(_, x: Array, *args, **kwargs) -> Routed:
    """The PartitionSpecs of the results under Explicit axes."""
    return Routed(P(*jax.typeof(x).sharding.spec), P(), P())


@auto_axes(_specs)
def clamped_mixture(
    x: Float[Array, "B T D"],
    params: Tree,
    *,
    top_k: int,
    alpha: float = 1.702,
    limit: float = 7.0,
    padding_mask: Bool[Array, "B T"] | None = None,
) -> Routed:
    """sum_k w_k expert_{e_k}(x): w is the softmax of the top_k largest logits x router + b.

    An expert is `clamped_swiglu`(x gate_up + b) down + b. `params` are those of
    `ClampedMixture.spec`. The router works in float32 or better. A token where `padding_mask` is
    False goes to no expert. No choice is dropped. There are no second derivatives.
    """
    B, T, D = x.shape
    router, gate_up, down = params["router"], params["gate_up"], params["down"]
    E = router["kernel"].shape[1]
    logits = einsum("btd,de->bte", in_float32(x), router["kernel"])
    routing = route(add_bias(logits, router["bias"]), top_k)
    if padding_mask is None:
        padding_mask = jnp.ones((B, T), bool)
    expert_ids = jnp.where(padding_mask[:, :, None], routing.experts, E).reshape(B * T, top_k).T
    weights = routing.weights.reshape(B * T, top_k).T
    experts = _Experts(
        gate=(gate_up["bias"], down["bias"]),
        up=gate_up["kernel"],
        down=down["kernel"],
        activation=partial(clamped_swiglu, alpha=alpha, limit=limit),
    )
    choices = Choices(x.reshape(B * T, D), expert_ids, weights)
    out, _ = local(choices, experts, E, expert_capacity=None)
    count = jnp.maximum(jnp.sum(padding_mask), 1)
    fraction = count_choices(expert_ids, E) / count
    probabilities = jnp.where(padding_mask[:, :, None], routing.probabilities, 0)
    return Routed(out.reshape(B, T, D), fraction, jnp.sum(probabilities, axis=(0, 1)) / count)


class _Experts(Experts):
    """Experts with biases: `gate` has those of up `[E, 2 F]` and of down `[E, D]`."""

    def __call__(self, product: Callable, x: Array) -> Array:
        up_bias, down_bias = self.gate
        # `product` finds the expert of each row; a bias is the matrix of a feature that is 1
        one = jnp.ones_like(x[..., :1])
        hidden = self.activation(product(x, self.up) + product(one, up_bias[:, None]))
        return product(hidden, self.down) + product(one, down_bias[:, None])


@dataclass(frozen=True)
class ClampedMixture:
    """A mixture of experts with biases and a clamped gate, `clamped_mixture`.

    The defaults are gpt-oss-20b: OpenAI 2025, arXiv:2508.10925. A mesh may split the weights, but
    tokens are not sent to the devices of their experts. For large meshes see `models.Mixture`.
    """

    experts: int = 32  # number of experts
    top_k: int = 4  # number of experts for one token
    alpha: float = 1.702  # factor of the gate in the sigmoid
    limit: float = 7.0  # bound of gates from above, and of the other factor on both sides
    d_ff: int | None = None  # width of one expert; None: the config's
    # weight of the loss that evens out the load of the experts, in each micro-batch
    balance_loss: float = 0.0

    def __post_init__(self):
        sizes = dict(experts=1, top_k=1, d_ff=1)
        check_numbers("model.feedforward.", self, **sizes, alpha=0, limit=0, balance_loss=0)
        if self.top_k > self.experts:
            raise ConfigError(
                f"model.feedforward.top_k={self.top_k}: must be 1 to {self.experts}, "
                "the number of experts"
            )

    def __call__(self, config: ModelConfig) -> FeedForward:
        return FeedForward(self.spec(config), self.apply, visited=self.top_k)

    def spec(self, config: ModelConfig) -> Tree:
        """The maps router `[D, E]`, gate_up `[E, D, 2 F]` and down `[E, F, D]`, with biases."""
        D, F, E = config.d_model, self.d_ff or config.ff_width, self.experts
        std = normal(config.std)
        out_std = normal(residual_std(config))
        return {
            "router": linear((D, E), ("embed", "expert"), ("embed",), std),
            "gate_up": linear((E, D, 2 * F), ("expert", "embed", "mlp"), ("embed",), std),
            "down": linear((E, F, D), ("expert", "mlp", "embed"), ("mlp",), out_std),
        }

    def apply(self, params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        routed = clamped_mixture(
            x,
            params,
            top_k=self.top_k,
            alpha=self.alpha,
            limit=self.limit,
            padding_mask=context.padding_mask,
        )
        loss = None
        if self.balance_loss:
            loss = self.balance_loss * balance_loss(routed.fraction, routed.probability)
        stats = {"fraction": routed.fraction, "probability": routed.probability}
        # of the busiest expert; top_k if all are equal
        stats["expert_load"] = self.experts * routed.fraction.max()
        return FeedForwardOutput(routed.out, loss, stats)
