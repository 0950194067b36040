"""DINOv2: a vision transformer with LayerScale, and its linear classifier.

Oquab et al. 2023, arXiv:2304.07193. The weights were trained on images of 518 pixels. For other
images, `models.vision.resize` interpolates the table of positions as the authors' code does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import models, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import full
from jaxformer.models.config import Classification, ModelConfig, Patches
from jaxformer.models.heads import Head, pool
from jaxformer.models.layer import linear
from jaxformer.models.norm import norm
from jaxformer.models.presets import sized
from jaxformer.params import Tree
from jaxformer.zoo.layer_scale import LayerScale


@dataclass(frozen=True)
class ClassAndPatches:
    """A head: classes, by a linear map of the class token beside the mean of the patches.

    Oquab et al. 2023, section 7.1. Raises ConfigError for tokens.
    """

    classes: int  # their number
    name: str = "classification"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("ClassAndPatches.", self, classes=1)

    def __call__(self, config: ModelConfig) -> Head:
        patches = config.embedding
        if not isinstance(patches, Patches) or not patches.class_token:
            raise ConfigError(
                f"model.heads: {self} reads a class token and patches; "
                f"model.embedding={patches} has none; expected models.Patches(class_token=True)"
            )
        start = normal(config.std)
        shape = 2 * config.hidden_width, self.classes
        spec = params.linear(shape, ("embed", "class"), ("embed",), start, True)

        def apply(params: Tree, hidden: Float[Array, "B T D"], *_) -> Float[Array, "B C"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            mean = pool(hidden[:, patches.first_patch :], "mean")
            features = jnp.concatenate([hidden[:, 0], mean], axis=-1)
            return linear("bd,dc->bc", features, params, wide)

        return Head(self.name, spec, apply)


def feature_maps(
    config: ModelConfig,
    weights: Tree,
    images: Float[Array, "B height width C"],
    stages: Sequence[int],
    *,
    with_norm: bool = True,
) -> list[Float[Array, "B down across D"]]:
    """The states of the patches after each of `stages` layers, on their grid, under the last norm.

    Stage 0 is the embedding, and stage L is after the last layer. transformers' Dinov2Backbone
    gives [B, D, down, across]; its `apply_layernorm` is `with_norm`. Raises ConfigError for a stage
    that the model does not have, and for a model of tokens.
    """
    patches = config.embedding
    if not isinstance(patches, Patches):
        raise ConfigError(f"feature_maps: model.embedding={patches}: expected models.Patches(...)")
    L = config.num_layers
    if wrong := [stage for stage in stages if not 0 <= stage <= L]:
        raise ConfigError(f"feature_maps: stages={wrong}: a model of {L} layers has 0 to {L}")
    names = [f"layers/{stage - 1}/residual" if stage else "embedding" for stage in stages]
    output = models.encode(config, weights, images, intermediates=tuple(names))
    maps = []
    for name in names:
        x = output.intermediates[name]
        x = norm(config, weights["final_norm"], x) if with_norm else x
        x = x[:, patches.first_patch :]
        maps.append(x.reshape(len(x), *patches.grid, config.d_model))
    return maps


# Oquab et al. 2023, table 17: the published backbones; `pooled` is the class token
dinov2_base = ModelConfig(
    vocab_size=0,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=1370,
    feedforward="gelu",
    norm_eps=1e-6,
    block=LayerScale(1.0),
    masks=(full(),),
    embedding=Patches((518, 518), (14, 14), mask_token=True),
    heads=(Classification(None, pooler=None, name="pooled"),),
)
dinov2_small = sized(dinov2_base, 12, 384, 6)
dinov2_large = sized(dinov2_base, 24, 1024, 16)
dinov2_giant = sized(dinov2_base, 40, 1536, 24, d_ff=4096, feedforward="swiglu")
