"""Routed experts as a feed-forward layer: `ModelConfig(feedforward=Mixture(experts=8, top_k=2), ...)`."""

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
from jaxformer.params import Spec

Tree = Any


@dataclass(frozen=True)
class Mixture:
    """Each token goes to `top_k` of the experts: Mixtral (the defaults), Switch (top_k=1, normalise=False), `ops.mixture`.

    Besides, all tokens go through one expert of width `shared`, with `shared_gate` times a sigmoid of its own (Qwen2-MoE;
    without it DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066). `balance_loss` and `router_z_loss` weight the two losses of
    each layer, whose sum is `FeedForwardOutput.loss`. There are no biases.
    """

    experts: int = 8
    top_k: int = 2
    activation: str = "swiglu"  # an activation or a gate
    d_ff: int | None = None  # width of one expert; None: the config's
    normalise: bool = True  # the weights of a token's experts sum to one
    shared: int = 0
    shared_gate: bool = False
    capacity: float | None = None  # None: no choice is dropped
    balance_loss: float = 0.0
    router_z_loss: float = 0.0

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
        D, E, F = config.d_model, self.experts, self.d_ff or config.ff_width
        gated = self.activation in GATES
        activation = ACTIVATIONS[GATES.get(self.activation, self.activation)]

        def kernel(shape, axes, contracts, std=config.init_std):
            return {"kernel": Spec(shape, axes, normal(std), (contracts,))}

        def expert(F: int, lead=(), lead_axes=()) -> Tree:
            into = kernel((*lead, D, F), (*lead_axes, "embed", "mlp"), "embed")
            down = kernel((*lead, F, D), (*lead_axes, "mlp", "embed"), "mlp", residual_std(config))
            return {"up": into, "down": down} | ({"gate": into} if gated else {})

        spec = {"router": kernel((D, E), ("embed", "expert"), "embed"), **expert(F, (E,), ("expert",))}
        if self.shared:
            spec["shared"] = expert(self.shared)
        if self.shared_gate:
            spec["shared_gate"] = kernel((D, 1), ("embed", None), "embed")

        def everyones(params, x):
            weights = {name: matrix["kernel"] for name, matrix in params["shared"].items()}
            out = (ops.glu if gated else ops.mlp)(x, **weights, activation=activation)
            if self.shared_gate:
                out = out * jax.nn.sigmoid(ops.einsum("btd,dn->btn", x, params["shared_gate"]["kernel"]))
            return out

        def apply(params, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
            router, up, down = (params[name]["kernel"] for name in ("router", "up", "down"))
            gate = params["gate"]["kernel"] if gated else None
            options = dict(top_k=self.top_k, normalise=self.normalise, capacity=self.capacity, real=context.real)
            out, routed = mixture(x, router, gate, up, down, activation, **options)
            if self.shared:
                out = out + everyones(params, x)
            loss = None
            if self.balance_loss or self.router_z_loss:
                balance = balance_loss(routed.fraction, routed.probability)
                loss = self.balance_loss * balance + self.router_z_loss * routed.z
            stats = {name: getattr(routed, name) for name in ("fraction", "probability", "dropped")}
            stats["expert_load"] = E * routed.fraction.max()  # of the busiest expert; top_k where all get alike
            return FeedForwardOutput(out, loss, stats)

        return FeedForward(spec, apply)
