"""A stack of layers run in stages: `ModelConfig(stack=Pipeline(microbatches=8))` on a mesh with `stage` > 1."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxformer.errors import ConfigError
from jaxformer.models import block, transformer
from jaxformer.models.config import ModelConfig
from jaxformer.parallel.pipeline import pipeline

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """`transformer.stack`, its layers dealt out over the mesh axis `stage` as `parallel.pipeline` says.

    `microbatches` None is as many as stages; R `repeats` make the bubble R times smaller and send activations R times as
    often. Same values as `transformer.stack`, which it is without stages, but for dropout, whose key is folded with the
    microbatch (other masks than one device's), and for auxiliary losses and figures of feed-forwards, which are those of
    a microbatch, in the mean. Raises ConfigError where the pattern of masks and mixers does not divide the layers of a
    stage, NotImplementedError for decoding, attention maps, a memo, and different mixers that draw constants.
    """

    microbatches: int | None = None
    repeats: int = 1

    def __call__(
        self, config: ModelConfig, params: Tree, x, context: block.Context, layer_masks, state, constants=None
    ):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape.get("stage", 1) == 1:
            return transformer.stack(config, params, x, context, layer_masks, state, constants)
        slots, stages = transformer.mixers(config), mesh.shape["stage"]
        if state is not None or context.return_weights or slots[0].memo(x) is not None:
            raise NotImplementedError("a pipeline has no cache, attention maps or memo; mesh.stage=1 has them")
        drawn = [slot.constants(x.shape[1]) for slot in slots] if constants is None else [constants]
        if not transformer.alike(config) and jax.tree.leaves(drawn):
            raise NotImplementedError("a pipeline of different mixers draws no constants; mesh.stage=1 does")
        period, parts = math.lcm(len(layer_masks), len(slots)), stages * self.repeats
        if config.num_layers % (parts * period):
            raise ConfigError(
                f"model.num_layers={config.num_layers}: mesh.stage={stages} x mesh.repeats={self.repeats} parts of whole "
                f"patterns of {period} masks and mixers take a multiple of {parts * period}"
            )
        few = replace(config, num_layers=config.num_layers // parts)
        shared = dict(shared=context.shared, dropout_key=context.dropout_key)
        names = "positions", "slot_positions", "inputs", "real", "source"  # what has rows
        extras = {name: getattr(context, name) for name in names}, layer_masks

        def stage(layers, pick, x, extras, shared, part, microbatch):
            own, masks = extras
            if (key := shared["dropout_key"]) is not None:
                key = jax.random.fold_in(key, microbatch)
            here = replace(context, **own, shared=shared["shared"], dropout_key=key, layer=part * few.num_layers)
            x, beside = transformer.stack(few, layers[0], x, here, masks, None, layers[1], pick)
            return x, (beside.loss, beside.stats)

        x, (loss, stats) = pipeline(
            stage, (params, drawn[0]), x, extras, shared, repeats=self.repeats,
            microbatches=stages if self.microbatches is None else self.microbatches,
        )  # fmt: skip
        return x, block.Beside(None, None, None, loss, stats)
