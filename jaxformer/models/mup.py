"""The maximal update parameterisation: one learning rate for all widths. Yang et al. 2022, arXiv:2203.03466, table 3."""

import math
from dataclasses import dataclass, replace

import jax

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.params import Spec, Tree, scale_init

WIDTHS = {"embed", "mlp", "heads", "kv_heads", "head"}  # axes that grow with the model; vocabulary, experts, pixels do not


@dataclass(frozen=True)
class MuP:
    """`ModelConfig(init_std=MuP(base_width=64))`: the best learning rate is that of the model whose `d_model` is 64.

    With r = d_model / base_width: a matrix that sums over a width starts at std / sqrt(r), or at std / r if it ends in
    something finite (logits, classes, experts), and learns at 1 / r of the rate. Logits of a tied embedding are divided by r.
    All else is as it was, so at r = 1 nothing changes. All widths are meant to grow together.
    The rates hold for Adam, AdamW and Lion, whose updates do not depend on the size of the gradient.
    """

    base_width: int  # d_model at which the learning rate was found
    init_std: float = 0.02  # of matrices there
    base_head_width: int | None = None  # head width there; scores are q k sqrt(it) / H. None: heads are as wide everywhere

    def __post_init__(self):
        check_numbers("model.init_std.", self, base_width=1, init_std=0, base_head_width=1)
        if not self.init_std:
            raise ConfigError(f"model.init_std={self}: widths and init_std must be positive")

    def score_scale(self, head_width: int) -> float | None:
        """Factor of attention scores: 1 / H instead of 1 / sqrt(H), equal at the base."""
        return None if self.base_head_width is None else math.sqrt(self.base_head_width) / head_width

    def spec(self, tree: Tree, d_model: int) -> Tree:
        """The parameters of a model of this width with the initial values and learning rates of this parameterisation."""
        r = d_model / self.base_width

        def change(leaf: Spec) -> Spec:
            if not WIDTHS.intersection(leaf.contracts):
                return leaf
            ends_in_width = WIDTHS.intersection(leaf.axes).difference(leaf.contracts)
            return replace(leaf, init=scale_init(leaf.init, r**-0.5 if ends_in_width else 1 / r), rate=leaf.rate / r)

        return tree if r == 1 else jax.tree.map(change, tree)
