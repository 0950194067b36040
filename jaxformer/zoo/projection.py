"""A linear map, an activation and a norm before a head: of another width, or without a bias.

    LanguageModel(Projection("gelu_tanh", width=128), bias=True)        # ALBERT
    LanguageModel(Projection("gelu", bias=False), bias=True)            # ModernBERT

With the model's width and a bias, `LanguageModel("gelu")` is the same.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.models.checks import require_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import Head, Transform, pool, projection
from jaxformer.models.layer import Tree, linear
from jaxformer.ops.feedforward import ACTIVATIONS


@dataclass(frozen=True)
class Projection:
    """norm(activation(x W + b)), the `transform` of a language model's head.

    BERT: Devlin et al. 2018, arXiv:1810.04805, in the published code. A width other than the
    model's is for tables of that width (`zoo.Factorised`).
    """

    activation: str = "gelu"  # between the map and the norm
    width: int | None = None  # features of the result; None: those of the hidden states
    bias: bool = True  # of the map

    _check = require_numbers(width=1)

    def __post_init__(self):
        self._check()
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"Projection.activation={self.activation!r}: expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )

    def __call__(self, config: ModelConfig) -> Transform:
        return projection(config, self.activation, self.width, self.bias)


@dataclass(frozen=True)
class ProjectedClasses:
    """Classes of a sequence, or of each position, behind a `Projection`.

    ModernBERT: Warner et al. 2024, arXiv:2412.13663, in the published code.
    """

    classes: int  # number of classes
    # None: classes of each position; else those of `models.Classification`
    pool: Literal["first", "mean", "last", "position_0"] | None = None
    projection: Projection = Projection()  # before the classes
    name: str = "classification"  # key of its parameters and of its output

    __post_init__ = require_numbers(classes=1)

    def __call__(self, config: ModelConfig) -> Head:
        transform = self.projection(config)
        shape = transform.width, self.classes
        spec: Tree = params.linear(
            shape, ("embed", "class"), ("embed",), normal(config.std), bias=True
        )
        spec["transform"] = transform.spec

        def apply(
            tree: Tree, hidden: Float[Array, "B T D"], padding_mask: Any, inputs: Tree
        ) -> Float[Array, "..."]:
            if self.pool is not None:
                hidden = pool(hidden, self.pool, padding_mask)[:, None]
            hidden = transform.apply(tree["transform"], hidden)
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            classes = linear("btd,dc->btc", hidden, tree, wide)
            return classes if self.pool is None else classes[:, 0]

        return Head(self.name, spec, apply)
