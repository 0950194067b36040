"""LayerScale: the output of each sub-layer times a trained vector, which starts small.

Touvron et al. 2021 (CaiT), arXiv:2103.17239, section 2.1. DINOv2 has it, too, and trains it with
stochastic depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import constant

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.blocks import Stream, Sublayers, add, final_norm, final_norm_spec, norms
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Block, Context
from jaxformer.models.norm import norm
from jaxformer.params import Spec, Tree


@dataclass(frozen=True)
class LayerScale:
    """x + lambda * f(norm(x)) for each sub-layer f, and a norm at the end.

    lambda is a vector `[D]` of each sub-layer. Touvron et al. 2021, arXiv:2103.17239, eq. 4.
    """

    initial: float = 1e-5  # of lambda; CaiT: 0.1 to 1e-6, the less the deeper; DINOv2: 1.0
    # the probability that a sub-layer adds nothing to an example in training, in every layer
    drop_path_rate: float = 0.0

    def __post_init__(self):
        check_numbers("LayerScale.", self, initial=0)
        if not 0 <= self.drop_path_rate < 1:
            raise ConfigError(f"LayerScale.drop_path_rate={self.drop_path_rate}: must be in [0, 1)")

    def evaluation(self) -> "LayerScale":
        return replace(self, drop_path_rate=0.0)

    def __call__(self, config: ModelConfig, names: Sequence[str]) -> Block:
        def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
            for i, (name, f) in enumerate(sublayers.items()):
                y = f(norm(config, params[f"{name}_norm"], x))
                scale = params[f"{name}_layer_scale"]["scale"].astype(y.dtype)
                key = context.dropout_key
                key = None if key is None else jax.random.fold_in(key, i)
                x = add(x, drop_path(y * scale[None, None], self.drop_path_rate, key))
            return x

        start = {"scale": Spec((config.d_model,), ("embed",), constant(self.initial))}
        scales = {f"{name}_layer_scale": start for name in names}
        return Block(
            norms(config, names, "{}_norm") | scales,
            apply,
            final_norm_spec(config),
            end=final_norm(config),
        )


def drop_path(y: Stream, rate: float, key: Array | None) -> Stream:
    """y / (1 - rate) in an example that keeps it, and 0 in a share `rate` of examples.

    Without a key, y. Stochastic depth: Huang et al. 2016, arXiv:1603.09382, eq. 5.
    """
    if key is None or rate == 0:
        return y
    is_kept = jax.random.bernoulli(key, 1 - rate, (len(y), 1, 1))
    return jnp.where(is_kept, y / (1 - rate), 0).astype(y.dtype)
