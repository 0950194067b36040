"""One layer: its sub-layers, and the block that adds each of them to the residual stream."""

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
from jaxformer.models.layer import (
    Block,
    Context,
    FeedForward,
    LayerOutput,
    Mixer,
    MixerOutput,
    Tree,
)
from jaxformer.models.mixers.attention import attention, attention_spec, cross_attention
from jaxformer.sharding import all_gather_weights


class Kind(NamedTuple):
    """The parts of a layer."""

    sublayers: dict[str, Mixer | FeedForward]  # by name, in their order
    block: Block

    @property
    def mixer(self) -> Mixer:
        return self.sublayers["attention"]  # type: ignore[return-value]

    @property
    def spec(self) -> Tree:
        """The parameters of one layer.

        Raises ConfigError if a parameter of the block has the name of a sub-layer.
        """
        own = self.block.spec or {}
        if both := sorted(own.keys() & self.sublayers.keys()):
            raise ConfigError(
                f"model.block: its parameter {both[0]!r} has the name of a sub-layer; "
                "give it another name"
            )
        return {name: sublayer.spec for name, sublayer in self.sublayers.items()} | own

    @property
    def shared(self) -> list[Tree]:
        """The parameters that each part declares for all layers together."""
        return [each.shared or {} for each in (*self.sublayers.values(), self.block)]


def kind(config: ModelConfig, source_width: int | None = None) -> Kind:
    """The parts of a layer. The config's mixer, feed-forward, block and positions are this layer's.

    `source_width` is the width of an encoder. With it, the layer also attends to the encoder's
    output.
    """
    mixer: Any = config.mixer or attention
    sublayers: dict[str, Any] = {"attention": mixer(config)}
    if source_width is not None:
        sublayers["cross_attention"] = Mixer(
            attention_spec(config, source_width), partial(cross_attention, config)
        )
    sublayers["feedforward"] = feed(config)
    block: Any = config.block or blocks.pre_norm
    return Kind(sublayers, block(config, tuple(sublayers)))


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
        feedforward = random.fold_in(key, 4)
        block = random.fold_in(key, 5)
        return cls(attention, attention_out, cross, cross_out, feedforward, feedforward_out, block)


def run(
    config: ModelConfig, kind: Kind, params: Tree, x: Float[Array, "B T ..."], context: Context
) -> LayerOutput:
    """One layer: `kind.block` with the sub-layers of `kind`.

    Raises ConfigError for a block that does not call each sub-layer once.
    """
    params = all_gather_weights(params, lambda: kind.spec, x.dtype)
    keys = DropoutKeys.split(context.dropout_key)
    calls = {
        name: SublayerCall(name, sublayer, params.get(name, {}), context, keys, config.dropout_rate)
        for name, sublayer in kind.sublayers.items()
    }
    # a norm may have no parameters
    own = {name: params.get(name, {}) for name in kind.block.spec or {}}
    x = kind.block.apply(own, x, calls, replace(context, dropout_key=keys.block))
    results = {name: call.only_result() for name, call in calls.items()}
    x = context.tap("residual", x)
    of_mixer = MixerOutput(*results["attention"])  # a mixer may return a plain tuple
    of_feedforward = results["feedforward"]
    updates = {
        name: result.updates
        for name, result in results.items()
        if getattr(result, "updates", None) is not None
    }
    return LayerOutput(
        x,
        of_mixer.state,
        of_mixer.carry,
        of_feedforward.loss,
        of_feedforward.stats,
        context.tap.found,
        updates or None,
    )


@dataclass(frozen=True, eq=False)
class SublayerCall:
    """A sub-layer as its block calls it: `y [B, T, D] -> [B, T, D]`, with dropout of the output.

    It keeps the sub-layer's whole result.
    """

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
            inner_key = getattr(self.keys, self.name)
            out_key = getattr(self.keys, f"{self.name}_out")
            context = replace(self.context, dropout_key=inner_key, tap=tap)
            result = self.sublayer.apply(self.params, y, context)
            self.results.append(result)
            return ops.dropout(tap("out", result[0]), self.dropout_rate, out_key)

    def only_result(self) -> Any:
        """The result of the sub-layer.

        Raises ConfigError if the block never called it, or called it more than once.
        """
        if len(self.results) != 1:
            called = "called twice, or more often," if self.results else "never called"
            raise ConfigError(
                f"model.block: it {called} the sub-layer {self.name}; "
                "a block calls each sub-layer once"
            )
        return self.results[0]
