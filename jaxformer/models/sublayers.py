"""One layer: its sub-layers, each called once by the block that adds them to the residual stream."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models import blocks
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feed
from jaxformer.models.layer import Block, Context, FeedForward, LayerOutput, Mixer, MixerOutput, Tree
from jaxformer.models.mixers.attention import attention, attention_spec, cross_attention
from jaxformer.sharding import all_gather_weights


class Kind(NamedTuple):
    """What a layer is made of."""

    sublayers: dict[str, Mixer | FeedForward]  # by name, in their order
    block: Block

    @property
    def mixer(self) -> Mixer:
        return self.sublayers["attention"]  # type: ignore[return-value]

    @property
    def spec(self) -> Tree:
        """The parameters of one layer. Raises ConfigError where the block and a sub-layer share a name."""
        own = self.block.spec or {}
        if both := sorted(own.keys() & self.sublayers.keys()):
            raise ConfigError(f"model.block: its parameter {both[0]!r} has the name of a sub-layer; give it another name")
        return {name: sublayer.spec for name, sublayer in self.sublayers.items()} | own

    @property
    def shared(self) -> list[Tree]:
        """What each part declares for all layers together."""
        return [part.shared or {} for part in (*self.sublayers.values(), self.block)]


def kind(config: ModelConfig, source_width: int | None = None) -> Kind:
    """The parts of a layer, for a config whose mixer, feed-forward and positions are those of this layer.

    With `source_width`, the width of an encoder, the layer also attends to the encoder's output.
    """
    sublayers: dict[str, Any] = {"attention": (config.mixer or attention)(config)}  # type: ignore[operator]
    if source_width is not None:
        sublayers["cross_attention"] = Mixer(attention_spec(config, source_width), partial(cross_attention, config))
    sublayers["feedforward"] = feed(config)
    return Kind(sublayers, (config.block or blocks.pre_norm)(config, tuple(sublayers)))


class DropoutKeys(NamedTuple):
    """The keys of one layer: for dropout inside a sub-layer, and for dropout of its output."""

    attention: Any = None
    attention_out: Any = None
    cross_attention: Any = None
    cross_attention_out: Any = None
    feedforward: Any = None
    feedforward_out: Any = None
    block: Any = None

    @classmethod
    def split(cls, key: Array | None) -> "DropoutKeys":
        """No keys without one."""
        if key is None:
            return cls()
        attention, attention_out, feedforward_out = random.split(key, 3)
        cross, cross_out = random.split(random.fold_in(key, 3))
        feedforward, block = random.fold_in(key, 4), random.fold_in(key, 5)
        return cls(attention, attention_out, cross, cross_out, feedforward, feedforward_out, block)


def run(config: ModelConfig, kind: Kind, params: Tree, x: Float[Array, "B T ..."], context: Context) -> LayerOutput:
    """One layer: `kind.block` with the sub-layers of `kind`. ConfigError for a block that does not call each once."""
    params = all_gather_weights(params, lambda: kind.spec, x.dtype)
    keys = DropoutKeys.split(context.dropout_key)
    calls = {
        name: SublayerCall(name, sublayer, params.get(name, {}), context, keys, config.dropout_rate)
        for name, sublayer in kind.sublayers.items()
    }
    own = {name: params.get(name, {}) for name in kind.block.spec or {}}  # a norm may have no parameters
    x = kind.block.apply(own, x, calls, replace(context, dropout_key=keys.block))
    results = {name: call.only_result() for name, call in calls.items()}
    x = context.tap("residual", x)
    mixed, fed = MixerOutput(*results["attention"]), results["feedforward"]  # a mixer may return a plain tuple
    updates = {name: result.updates for name, result in results.items() if getattr(result, "updates", None) is not None}
    return LayerOutput(x, mixed.state, mixed.carry, fed.loss, fed.stats, context.tap.found, updates or None)


@dataclass(frozen=True, eq=False)
class SublayerCall:
    """A sub-layer as its block calls it, `y [B, T, D] -> [B, T, D]`: with dropout of its output. It keeps the whole result."""

    name: str
    sublayer: Mixer | FeedForward
    params: Tree
    context: Context
    keys: DropoutKeys
    dropout_rate: float
    results: list[Any] = field(default_factory=list)

    def __call__(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        with jax.named_scope(self.name):
            tap = self.context.tap.inside(self.name)
            y = tap("input", y)
            inside = replace(self.context, dropout_key=getattr(self.keys, self.name), tap=tap)
            result = self.sublayer.apply(self.params, y, inside)
            self.results.append(result)
            return ops.dropout(tap("out", result[0]), self.dropout_rate, getattr(self.keys, f"{self.name}_out"))

    def only_result(self) -> Any:
        """What the sub-layer returned. ConfigError where the block called it twice, or never."""
        if len(self.results) != 1:
            found = "never called" if not self.results else "called twice, or more often,"
            raise ConfigError(f"model.block: it {found} the sub-layer {self.name}; a block calls each sub-layer once")
        return self.results[0]
