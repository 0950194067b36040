"""Routed experts as a feed-forward layer: `ModelConfig(feedforward=Mixture(experts=8, top_k=2), ...)`."""

from dataclasses import dataclass, replace

from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feedforward, feedforward_spec
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.mixture import balance_loss, mixture
from jaxformer.params import Tree, linear


@dataclass(frozen=True)
class Mixture:
    """Each token goes to `top_k` of the experts: Mixtral (the defaults), Switch (top_k=1, normalise=False), `ops.mixture`.

    `shared`: DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066. There are no biases. A capacity is for training: tokens that
    compete for an expert depend on their neighbours. With a cache (generation) no choice is dropped; for scores see
    `evaluation`.
    """

    experts: int = 8  # how many there are
    top_k: int = 2  # how many a token goes to
    activation: str = "swiglu"  # of each expert: an activation or a gate
    d_ff: int | None = None  # width of one expert; None: the config's
    normalise: bool = True  # the weights of a token's experts sum to one
    shared: int = 0  # width of an expert that all tokens go through; 0: there is none
    capacity: float | None = None  # choices that an expert takes, as a multiple of an even share of the tokens; None: no limit
    groups: int = 1  # parts of a batch, each with its own capacity; as many as devices split it saves memory and exchanges
    device_capacity: float | None = (
        None  # choices that a device's experts take together, as a multiple of an even share; None: all
    )
    balance_loss: float = 0.0  # weight of the loss that evens out the load of the experts, in each micro-batch
    router_z_loss: float = 0.0  # weight of the loss that keeps the router's logits small

    def __post_init__(self):
        integers = dict(experts=1, top_k=1, d_ff=1, shared=0, groups=1)
        factors = dict(capacity=0, device_capacity=1, balance_loss=0, router_z_loss=0)
        check_numbers("model.feedforward.", self, **integers, **factors)
        words = (*ACTIVATIONS, *GATES)
        lone = self.normalise and self.top_k == 1 < self.experts and not self.balance_loss
        for field, right, expected in (
            ("capacity", self.capacity is None or self.capacity > 0, "must be above 0, or None"),
            ("device_capacity", None in (self.capacity, self.device_capacity), "experts have a capacity; set one of the two"),
            ("groups", self.groups == 1 or self.capacity is not None, "groups of tokens have a capacity; set it, too"),
            ("top_k", self.top_k <= self.experts, f"must be 1 to {self.experts}, the number of experts"),
            ("activation", self.activation in words, f"expected one of {', '.join(words)}"),
            ("normalise", not lone, "a lone weight is 1 and teaches nothing; for top_k=1 set it to False, or a balance_loss"),
        ):
            if not right:
                raise ConfigError(f"model.feedforward.{field}={getattr(self, field)!r}: {expected}")

    def __call__(self, config: ModelConfig) -> FeedForward:
        return FeedForward(self.spec(config), self.apply)

    def evaluation(self) -> "Mixture":
        """Without a capacity of each expert. Where a mesh divides experts, those of a device have it together, as memory."""
        if self.capacity is None:
            return self
        return replace(self, capacity=None, groups=1, device_capacity=max(self.capacity, 1.0))

    def spec(self, config: ModelConfig) -> Tree:
        D, E = config.d_model, self.experts
        one = replace(config, feedforward=self.activation, d_ff=self.d_ff or config.ff_width, use_bias=False)
        router = linear((D, E), ("embed", "expert"), ("embed",), normal(config.std), bias=False)
        tree = {"router": router, **feedforward_spec(one, (E,), ("expert",))}
        if self.shared:
            tree["shared"] = feedforward_spec(replace(one, d_ff=self.shared))
        return tree

    def apply(self, params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        kernels = {name: params[name]["kernel"] for name in ("router", "up", "down")}
        kernels["gate"] = params["gate"]["kernel"] if self.activation in GATES else None
        activation = ACTIVATIONS[GATES.get(self.activation, self.activation)]
        names = "top_k", "normalise", *(() if context.cache_length else ("capacity", "device_capacity", "groups"))
        options = {name: getattr(self, name) for name in names}
        out, routed = mixture(x, **kernels, activation=activation, **options, padding_mask=context.padding_mask)
        if self.shared:
            out = out + feedforward(self.activation, params["shared"], x)
        loss = None
        if self.balance_loss or self.router_z_loss:
            balance = balance_loss(routed.fraction, routed.probability)
            loss = self.balance_loss * balance + self.router_z_loss * routed.z
        stats = {name: getattr(routed, name) for name in ("fraction", "probability", "dropped")}
        stats["expert_load"] = self.experts * routed.fraction.max()  # of the busiest expert; top_k if all are equal
        return FeedForwardOutput(out, loss, stats)
