"""Experts chosen in groups by sigmoid scores and a bias: DeepSeek-AI 2024, arXiv:2412.19437."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import normal, zeros
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feedforward, feedforward_spec
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, Tree
from jaxformer.ops.einsum import add_bias, einsum, in_float32
from jaxformer.ops.expert_capacity import count_choices
from jaxformer.ops.expert_dispatch import Choices, Experts, local
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.mixture import Routing
from jaxformer.params import Spec, linear


def route(
    logits: Float[Array, "*batch E"],
    bias: Float[Array, " E"],
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> Routing:
    """The top_k experts by sigmoid(logits) + bias, among those of the best `top_groups` groups.

    A group of E / groups experts is as good as the sum of its two best ones. The weights are
    sigmoid(logits), without the bias, in float32 or better. `normalise` makes the weights of a
    token sum to one before they are multiplied by `scale`. DeepSeek-AI 2024, arXiv:2412.19437, eq.
    12-16 and section 2.1.2.
    """
    scores = jax.nn.sigmoid(in_float32(logits))
    grouped = add_bias(scores, bias).reshape(*scores.shape[:-1], groups, -1)
    best_two, _ = lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, best_groups = lax.top_k(jnp.sum(best_two, axis=-1), top_groups)
    is_best = jnp.any(jax.nn.one_hot(best_groups, groups, dtype=bool), axis=-2)
    choice = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)
    _, experts = lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(scale * weights, experts, scores)


@dataclass(frozen=True)
class GroupedExperts:
    """The experts of DeepSeek-V3, as a feed-forward: `route`, and an expert for all tokens.

    DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2. No choice is dropped. The router has a bias
    for the choice alone, a variable. With a `bias_rate`, each step of training raises the bias of
    experts with less than an even share of the tokens and lowers that of the others (Wang et al.
    2024, arXiv:2408.15664), which takes the place of a loss. Experts have no biases.
    There is no capacity and no `shard_map`: on a mesh the compiler brings tokens to their experts.
    """

    experts: int = 256  # number of routed experts
    top_k: int = 8  # number of experts for one token
    groups: int = 8  # number of groups of experts
    top_groups: int = 4  # number of groups that a token's experts come from
    activation: str = "swiglu"  # of each expert: an activation or a gate
    d_ff: int | None = None  # width of one expert; None: the config's
    shared: int = 0  # width of an expert for all tokens; 0: there is none
    normalise: bool = True  # whether the weights of a token's experts sum to `scale`
    scale: float = 2.5  # factor of the weights
    bias_rate: float = 0.0  # change of the router's bias in a step; 0: the bias is fixed

    def __post_init__(self):
        integers = dict(experts=1, top_k=1, groups=1, top_groups=1, d_ff=1, shared=0)
        check_numbers("model.feedforward.", self, **integers, scale=0, bias_rate=0)
        words = (*ACTIVATIONS, *GATES)

        def refuse(field: str, is_wrong: bool, expected: str) -> None:
            if is_wrong:
                raise ConfigError(f"model.feedforward.{field}={getattr(self, field)!r}: {expected}")

        divides = f"must divide experts={self.experts}"
        refuse("groups", self.experts % self.groups != 0, divides)
        refuse("top_groups", self.top_groups > self.groups, f"must be 1 to groups={self.groups}")
        size = self.top_groups * self.experts // self.groups
        refuse("top_k", self.top_k > size, f"must be 1 to {size}, the experts of a token's groups")
        refuse("activation", self.activation not in words, f"expected one of {', '.join(words)}")

    def __call__(self, config: ModelConfig) -> FeedForward:
        return FeedForward(self.spec(config), self.apply, visited=self.top_k)

    def spec(self, config: ModelConfig) -> Tree:
        D, E = config.d_model, self.experts
        expert = replace(
            config, feedforward=self.activation, d_ff=self.d_ff or config.ff_width, use_bias=False
        )
        router = linear((D, E), ("embed", "expert"), ("embed",), normal(config.std), bias=False)
        tree = {
            "router": router,
            "choice_bias": Spec((E,), (None,), zeros, trained=False),
            **feedforward_spec(expert, (E,), ("expert",)),
        }
        if self.shared:
            tree["shared"] = feedforward_spec(replace(expert, d_ff=self.shared))
        return tree

    def apply(self, params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        E, k = self.experts, self.top_k
        logits = einsum("btd,de->bte", in_float32(x), params["router"]["kernel"])
        names = ["groups", "top_groups", "normalise", "scale"]
        options = {name: getattr(self, name) for name in names}
        routing = route(logits, params["choice_bias"], k, **options)
        chosen = routing.experts
        if context.padding_mask is not None:  # padding goes to no expert
            chosen = jnp.where(context.padding_mask[:, :, None], chosen, E)
        choices = Choices(
            x.reshape(-1, x.shape[-1]), chosen.reshape(-1, k).T, routing.weights.reshape(-1, k).T
        )
        gate = params["gate"]["kernel"] if "gate" in params else None
        up, down = (params[name]["kernel"] for name in ("up", "down"))
        activation = ACTIVATIONS[GATES.get(self.activation, self.activation)]
        out, _ = local(choices, Experts(gate, up, down, activation), E, None)
        out = out.reshape(x.shape)
        if self.shared:
            out = out + feedforward(self.activation, params["shared"], x)
        sizes = count_choices(chosen, E).astype(logits.dtype)
        fraction = sizes * k / jnp.maximum(jnp.sum(sizes), 1)  # choices of each expert per token
        stats = {"fraction": fraction, "expert_load": E * jnp.max(fraction)}
        updates = None
        if self.bias_rate:
            step = self.bias_rate * jnp.sign(jnp.mean(fraction) - fraction)
            updates = {"choice_bias": params["choice_bias"] + step}
        return FeedForwardOutput(out, None, stats, updates)
