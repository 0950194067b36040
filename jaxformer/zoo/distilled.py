"""DeiT: a class token and a distillation token, with a classifier each.

Touvron et al. 2020, arXiv:2012.12877. `Patches(extra_tokens=1)` is the distillation token. A
teacher's classes are the labels of its classifier, the true classes those of the other.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig, Patches
from jaxformer.models.heads import Head
from jaxformer.models.layer import linear
from jaxformer.params import Tree


def class_and_distillation(
    params: Tree, hidden: Float[Array, "B T D"]
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """The logits of both classifiers, from the parameters of `DistilledClassification`.

    Touvron et al. 2020, section 3: each has a loss of its own.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    of_class = linear("bd,dc->bc", hidden[:, 0], params["class_token"], wide)
    return of_class, linear("bd,dc->bc", hidden[:, 1], params["distillation_token"], wide)


@dataclass(frozen=True)
class DistilledClassification:
    """A head: the mean of the logits of both classifiers.

    Raises ConfigError for an embedding without these two tokens.
    """

    classes: int  # their number
    name: str = "distilled_classification"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("DistilledClassification.", self, classes=1)

    def __call__(self, config: ModelConfig) -> Head:
        patches = config.embedding
        if not isinstance(patches, Patches) or patches.first_patch != 2 or not patches.class_token:
            raise ConfigError(
                f"model.heads: {self} reads a class token and a distillation token; "
                f"model.embedding={patches} has others; expected models.Patches(extra_tokens=1)"
            )
        shape = config.hidden_width, self.classes
        matrix = params.linear(shape, ("embed", "class"), ("embed",), normal(config.std), True)

        def apply(params: Tree, hidden: Float[Array, "B T D"], *_) -> Float[Array, "B C"]:
            of_class, of_teacher = class_and_distillation(params, hidden)
            return (of_class + of_teacher) / 2

        return Head(self.name, {"class_token": matrix, "distillation_token": matrix}, apply)
