"""A gate on the output of each head: Qiu et al. 2025, arXiv:2505.06708."""

import jax
from jax import Array
from jaxtyping import Float

from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Mixer, Tree, linear, linear_spec
from jaxformer.models.mixers.attention import attention


def gated(config: ModelConfig) -> Mixer:
    """sigmoid(x W) * out, where x is the input of the layer and W is `[D, N, H]`.

    Qiu et al. 2025, arXiv:2505.06708, variant G1; Qwen3-Next has it.
    """
    shape = (config.d_model, config.num_heads, config.head_size)
    axes = ("embed", "heads", "head")
    extra = {"gate": linear_spec(config, "gate", shape, axes, ("embed",), config.std)}
    return attention(config, extra=extra, finish=gate)


def gate(
    params: Tree, x: Float[Array, "B T D"], out: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """out * sigmoid(x W): the `finish` of `gated`."""
    return out * jax.nn.sigmoid(linear("btd,dnh->btnh", x, params["gate"]))
