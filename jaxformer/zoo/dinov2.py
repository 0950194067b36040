"""DINOv2: a vision transformer with LayerScale, and its linear classifier.

Oquab et al. 2023, arXiv:2304.07193. The weights were trained on images of 518 pixels. For other
images, `models.vision.resize` interpolates the table of positions as the authors' code does.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import full
from jaxformer.models.config import Classification, ModelConfig, Patches
from jaxformer.models.heads import Head, pool
from jaxformer.models.layer import linear
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
