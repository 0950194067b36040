"""LayerScale: the output of each sub-layer times a trained vector, which starts small.

Touvron et al. 2021 (CaiT), arXiv:2103.17239, section 2.1. DINOv2 has it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.nn.initializers import constant

from jaxformer.errors import check_numbers
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

    def __post_init__(self):
        check_numbers("LayerScale.", self, initial=0)

    def __call__(self, config: ModelConfig, names: Sequence[str]) -> Block:
        def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
            for name, f in sublayers.items():
                y = f(norm(config, params[f"{name}_norm"], x))
                scale = params[f"{name}_layer_scale"]["scale"].astype(y.dtype)
                x = add(x, y * scale[None, None])
            return x

        start = {"scale": Spec((config.d_model,), ("embed",), constant(self.initial))}
        scales = {f"{name}_layer_scale": start for name in names}
        return Block(
            norms(config, names, "{}_norm") | scales,
            apply,
            final_norm_spec(config),
            end=final_norm(config),
        )
