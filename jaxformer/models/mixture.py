"""Routed experts as a feed-forward layer: `ModelConfig(feedforward=Mixture(experts=8, top_k=2), ...)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, residual_std
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.mixture import balance_loss, mixture
from jaxformer.params import linear

Tree = Any


@dataclass(frozen=True)
class Mixture:
    """Each token goes to `top_k` of the experts: Mixtral (the defaults), Switch (top_k=1, normalise=False), `ops.mixture`.

    `shared` adds one expert that all tokens go through (Qwen2-MoE; without the gate DeepSeekMoE, Dai et al. 2024,
    arXiv:2401.06066). There are no biases.
    """

    experts: int = 8  # how many there are
    top_k: int = 2  # how many a token goes to
    activation: str = "swiglu"  # of each expert: an activation or a gate
    d_ff: int | None = None  # width of one expert; None: the config's
    normalise: bool = True  # the weights of a token's experts sum to one
    shared: int = 0  # width of an expert that all tokens go through; 0: there is none
    shared_gate: bool = False  # whether the shared expert is multiplied by a sigmoid of its own
    capacity: float | None = None  # room of an expert, as a multiple of an even share of the tokens; None: no limit
    balance_loss: float = 0.0  # weight of the loss that evens out the load of the experts
    router_z_loss: float = 0.0  # weight of the loss that keeps the router's logits small

    def __post_init__(self):
        def refuse(field: str, expected: str):
            raise ConfigError(f"model.feedforward.{field}={getattr(self, field)!r}: {expected}")

        for field, least in (("experts", 1), ("shared", 0), ("balance_loss", 0), ("router_z_loss", 0)):
            if getattr(self, field) < least:
                refuse(field, f"must be at least {least}")
        if not 1 <= self.top_k <= self.experts:
            refuse("top_k", f"must be 1 to {self.experts}, the number of experts")
        if self.activation not in ACTIVATIONS and self.activation not in GATES:
            refuse("activation", f"expected one of {', '.join((*ACTIVATIONS, *GATES))}")
        if self.d_ff is not None and self.d_ff < 1:
            refuse("d_ff", "must be at least 1, or None")
        if self.capacity is not None and self.capacity <= 0:
            refuse("capacity", "must be above 0, or None")
        if self.shared_gate and not self.shared:
            refuse("shared_gate", "there is no shared expert; set shared to its width")
        if self.normalise and self.top_k == 1 < self.experts and not self.balance_loss:
            refuse(
                "normalise", "a lone weight is 1 and teaches nothing; set it to False for top_k=1, or a balance_loss"
            )

    def __call__(self, config: ModelConfig) -> FeedForward:
        return FeedForward(self.spec(config), self.apply)

    @property
    def gated(self) -> bool:
        return self.activation in GATES

    @property
    def function(self) -> Callable:
        """The activation, or that of the gate."""
        return ACTIVATIONS[GATES.get(self.activation, self.activation)]

    def spec(self, config: ModelConfig) -> Tree:
        D, E = config.d_model, self.experts

        def matrix(shape, axes, contracts, std=config.init_std) -> Tree:
            return linear(shape, axes, (contracts,), normal(std), bias=False)

        def expert(F: int, lead=(), lead_axes=()) -> Tree:
            into = matrix((*lead, D, F), (*lead_axes, "embed", "mlp"), "embed")
            down = matrix((*lead, F, D), (*lead_axes, "mlp", "embed"), "mlp", residual_std(config))
            return {"up": into, "down": down} | ({"gate": into} if self.gated else {})

        router = matrix((D, E), ("embed", "expert"), "embed")
        tree = {"router": router, **expert(self.d_ff or config.ff_width, (E,), ("expert",))}
        if self.shared:
            tree["shared"] = expert(self.shared)
        if self.shared_gate:
            tree["shared_gate"] = matrix((D, 1), ("embed", None), "embed")
        return tree

    def apply(self, params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        kernels = {name: params[name]["kernel"] for name in ("router", "up", "down")}
        kernels["gate"] = params["gate"]["kernel"] if self.gated else None
        options = dict(top_k=self.top_k, normalise=self.normalise, capacity=self.capacity, real=context.real)
        out, routed = mixture(x, **kernels, activation=self.function, **options)
        if self.shared:
            out = out + self.apply_shared(params, x)
        loss = None
        if self.balance_loss or self.router_z_loss:
            balance = balance_loss(routed.fraction, routed.probability)
            loss = self.balance_loss * balance + self.router_z_loss * routed.z
        stats = {name: getattr(routed, name) for name in ("fraction", "probability", "dropped")}
        stats["expert_load"] = self.experts * routed.fraction.max()  # of the busiest expert; top_k if all are equal
        return FeedForwardOutput(out, loss, stats)

    def apply_shared(self, params: Tree, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The expert that all tokens go through."""
        weights = {name: matrix["kernel"] for name, matrix in params["shared"].items()}
        out = (ops.glu if self.gated else ops.mlp)(x, **weights, activation=self.function)
        if self.shared_gate:
            out = out * jax.nn.sigmoid(ops.einsum("btd,dn->btn", x, params["shared_gate"]["kernel"]))
        return out
