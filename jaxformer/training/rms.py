"""Root mean squares by layer as metrics: `Experiment(rms=("activation", "gradient", "update"))`.

The record names them `rms/gradient/layers/3` (the fourth layer), `rms/gradient/embedding`, ..., and
for an encoder-decoder `encoder/rms/gradient/layers/3`.

    activation   the residual stream after a layer, over all tokens
    gradient     the gradient before clipping
    update       the difference that the optimizer adds to the parameters
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.models.layer import Context, Layers
from jaxformer.models.stacks import layout, scan
from jaxformer.params import Tree, paths

RESIDUAL = "layers/*/residual"


def root_mean_square(x: Array) -> Array:
    """sqrt(mean(x^2)), in float32."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def by_layer(kind: str, spec: Tree, tree: Tree) -> dict[str, Array]:
    """{name: root mean square} for each part of a tree: `[L]` for the layers, a number for others.

    `spec` declares the tree. Layers that are stored by their place in a pattern
    (`models.stacks.layout`) are one part for each place: layers_place_0.
    """
    sums: dict[str, tuple[Any, int]] = {}
    leaves = paths(tree)
    for path, leaf in paths(spec).items():
        layers = leaf.shape[0] if leaf.axes[:1] == ("layers",) else 0
        of_place = re.sub(r"(^|/)layers/(\d+)/", r"\1layers_place_\2/", path)
        key = re.sub(r"^(encoder/|decoder/|)([^/]+).*", rf"\1rms/{kind}/\2", of_place)
        x = jnp.square(leaves[path].astype(jnp.float32))
        total, size = sums.get(key, (0.0, 0))
        axes = tuple(range(1 if layers else 0, x.ndim))
        sums[key] = (total + jnp.sum(x, axis=axes), size + x.size // max(layers, 1))
    return {name: jnp.sqrt(total / size) for name, (total, size) in sums.items()}


@dataclass(frozen=True)
class StackWithRms:
    """A stack that also reports the root mean square of the residual stream after each layer."""

    stack: Callable

    def spec(self, config: models.ModelConfig) -> Tree:
        """The parameters that the stack itself declares."""
        return layout.stack_spec(replace(config, stack=self.stack))

    def __call__(self, config: models.ModelConfig, layers: Layers, x: Array, context: Context):
        place = len(context.tap.wanted), RESIDUAL
        tap = replace(context.tap, wanted=(*context.tap.wanted, (RESIDUAL, root_mean_square)))
        x, output = self.stack(config, layers, x, replace(context, tap=tap))
        others = {key: value for key, value in output.intermediates.items() if key != place}
        stats = (output.stats or {}) | {"rms/activation/layers": output.intermediates[place]}
        return x, output._replace(intermediates=others, stats=stats)


def with_rms(model: Any) -> Any:
    """The model with stacks that report; your own model unchanged."""
    if isinstance(model, models.EncoderDecoder):
        return replace(model, encoder=with_rms(model.encoder), decoder=with_rms(model.decoder))
    if isinstance(model, models.ModelConfig):
        return replace(model, stack=StackWithRms(model.stack or scan.stack))
    return model
