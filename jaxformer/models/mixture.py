"""Routed experts as a feed-forward: `ModelConfig(feedforward=Mixture(experts=8, top_k=2), ...)`."""

from dataclasses import dataclass, replace

from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer.config.describe import execution
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feedforward, feedforward_spec
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.grouped_product import GroupedImplementation, has_own_form, unknown_grouped
from jaxformer.ops.mixture import balance_loss, mixture
from jaxformer.params import Tree, linear


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: each token goes to `top_k` of the experts. See `ops.mixture`.

    The defaults are Mixtral. Switch is top_k=1, normalise=False. `shared` is DeepSeekMoE: Dai et
    al. 2024, arXiv:2401.06066. There are no biases. A capacity is for training only, because tokens
    that compete for an expert then depend on their neighbours. With a cache (generation) no choice
    is dropped. For scores see `evaluation`.
    """

    experts: int = 8  # number of experts
    top_k: int = 2  # number of experts for one token
    activation: str = "swiglu"  # of each expert: an activation or a gate
    d_ff: int | None = None  # width of one expert; None: the config's
    normalise: bool = True  # whether the weights of a token's experts sum to one
    shared: int = 0  # width of an expert for all tokens; 0: there is none
    # largest number of tokens of one expert, as a multiple of an even share; None: no limit
    capacity: float | None = None
    # parts of a batch, each with its own capacity; one for each device of a split batch saves
    # memory and communication
    groups: int = 1
    # largest number of tokens of all experts of a device, as a multiple of an even share; None: no
    # limit
    device_capacity: float | None = None
    # weight of the loss that evens out the load of the experts, in each micro-batch
    balance_loss: float = 0.0
    router_z_loss: float = 0.0  # weight of the loss that keeps the router's logits small
    # of the products of experts without a capacity: "loop", "copies", "ragged", "tokamax", or a
    # `GroupedProduct` of your own; None: the fastest one
    grouped_implementation: GroupedImplementation = execution(None, unless=has_own_form)

    def __post_init__(self):
        integers = dict(experts=1, top_k=1, d_ff=1, shared=0, groups=1)
        factors = dict(capacity=0, device_capacity=1, balance_loss=0, router_z_loss=0)
        check_numbers("model.feedforward.", self, **integers, **factors)
        words = (*ACTIVATIONS, *GATES)
        has_lone_weight = (
            self.normalise and self.top_k == 1 < self.experts and not self.balance_loss
        )

        def refuse(field: str, is_wrong: bool, expected: str) -> None:
            if is_wrong:
                raise ConfigError(f"model.feedforward.{field}={getattr(self, field)!r}: {expected}")

        is_empty = self.capacity is not None and self.capacity <= 0
        refuse("capacity", is_empty, "must be above 0, or None")
        has_both = self.capacity is not None and self.device_capacity is not None
        refuse("device_capacity", has_both, "experts have a capacity; set one of the two")
        lacks_capacity = self.groups != 1 and self.capacity is None
        refuse("groups", lacks_capacity, "groups of tokens have a capacity; set it, too")
        too_many = self.top_k > self.experts
        refuse("top_k", too_many, f"must be 1 to {self.experts}, the number of experts")
        refuse("activation", self.activation not in words, f"expected one of {', '.join(words)}")
        advice = "for top_k=1 set it to False, or a balance_loss"
        form = unknown_grouped(self.grouped_implementation)
        refuse("grouped_implementation", form is not None, form or "")
        refuse("normalise", has_lone_weight, f"a lone weight is 1 and teaches nothing; {advice}")

    def __call__(self, config: ModelConfig) -> FeedForward:
        return FeedForward(self.spec(config), self.apply, visited=self.top_k)

    def evaluation(self) -> "Mixture":
        """The mixture for scores: no expert has a capacity of its own.

        If a mesh splits the experts, those of one device share a capacity: memory is finite.
        """
        if self.capacity is None:
            return self
        return replace(self, capacity=None, groups=1, device_capacity=max(self.capacity, 1.0))

    def spec(self, config: ModelConfig) -> Tree:
        D, E = config.d_model, self.experts
        expert = replace(
            config, feedforward=self.activation, d_ff=self.d_ff or config.ff_width, use_bias=False
        )
        router = linear((D, E), ("embed", "expert"), ("embed",), normal(config.std), bias=False)
        tree = {"router": router, **feedforward_spec(expert, (E,), ("expert",))}
        if self.shared:
            tree["shared"] = feedforward_spec(replace(expert, d_ff=self.shared))
        return tree

    def apply(self, params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        kernels = {name: params[name]["kernel"] for name in ("router", "up", "down")}
        kernels["gate"] = params["gate"]["kernel"] if self.activation in GATES else None
        activation = ACTIVATIONS[GATES.get(self.activation, self.activation)]
        names = ["top_k", "normalise"]
        if not context.cache_length:  # with a cache, no choice is dropped
            names += ["capacity", "device_capacity", "groups"]
        options = {name: getattr(self, name) for name in names}
        out, routed = mixture(
            x,
            **kernels,
            activation=activation,
            **options,
            padding_mask=context.padding_mask,
            implementation=self.grouped_implementation,
        )
        if self.shared:
            out = out + feedforward(self.activation, params["shared"], x)
        loss = None
        if self.balance_loss or self.router_z_loss:
            balance = balance_loss(routed.fraction, routed.probability)
            loss = self.balance_loss * balance + self.router_z_loss * routed.z
        stats = {name: getattr(routed, name) for name in ("fraction", "probability", "dropped")}
        # of the busiest expert; top_k if all are equal
        stats["expert_load"] = self.experts * routed.fraction.max()
        return FeedForwardOutput(out, loss, stats)
