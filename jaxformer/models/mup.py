"""The maximal update parameterisation (muP): one learning rate for all widths.

Yang et al. 2022, arXiv:2203.03466, table 3.
"""

import math
from dataclasses import dataclass, replace

import jax

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.params import Spec, Tree, scale_init

# axes that grow with the model; vocabulary, experts and pixels do not
WIDTHS = {"embed", "mlp", "heads", "kv_heads", "head"}


@dataclass(frozen=True)
class MuP:
    """`ModelConfig(init_std=MuP(base_width=64))`: the best learning rate is that of d_model = 64.

    Let r = d_model / base_width. A matrix that sums over a width starts at std / sqrt(r) and learns
    at 1 / r of the rate. If its outputs do not grow with the width (logits, classes, experts), it
    starts at std / r. Logits of a tied embedding are divided by r. Everything else is unchanged, so
    r = 1 changes nothing. All widths should grow together.
    The rates hold for Adam, AdamW and Lion: their updates do not depend on the gradient's size.
    """

    base_width: int  # the d_model at which the learning rate was found
    init_std: float = 0.02  # of matrices at the base width
    # head width at the base: scores are q k sqrt(base_head_width) / H;
    # None: all models have the same head width
    base_head_width: int | None = None

    def __post_init__(self):
        check_numbers("model.init_std.", self, base_width=1, init_std=0, base_head_width=1)
        if not self.init_std:
            raise ConfigError(f"model.init_std={self}: widths and init_std must be positive")

    def score_scale(self, head_width: int) -> float | None:
        """Factor of attention scores: sqrt(base_head_width) / H, so 1 / sqrt(H) at the base.

        None without a `base_head_width`.
        """
        if self.base_head_width is None:
            return None
        return math.sqrt(self.base_head_width) / head_width

    def spec(self, tree: Tree, d_model: int) -> Tree:
        """The parameters of a model of width `d_model`, with muP's initial values and rates."""
        r = d_model / self.base_width

        def change(leaf: Spec) -> Spec:
            if not WIDTHS.intersection(leaf.contracts):
                return leaf
            ends_in_width = WIDTHS.intersection(leaf.axes).difference(leaf.contracts)
            factor = r**-0.5 if ends_in_width else 1 / r
            return replace(leaf, init=scale_init(leaf.init, factor), rate=leaf.rate / r)

        return tree if r == 1 else jax.tree.map(change, tree)
