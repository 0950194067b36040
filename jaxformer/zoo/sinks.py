"""Attention sinks: one trained logit a head beside the scores.

gpt-oss has them: OpenAI 2025, arXiv:2508.10925.
"""

from jax.nn.initializers import normal

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer, Tree
from jaxformer.models.mixers.attention import attention
from jaxformer.params import Spec


def sinks(config: ModelConfig) -> Mixer:
    """Attention with a logit `[N]` in the denominator of the softmax: weights sum to less than one.

    So a head may attend to nothing. OpenAI 2025, arXiv:2508.10925. Edits of weights are refused.
    """
    extra = {"sinks": Spec((config.num_heads,), ("heads",), normal(config.std))}
    return attention(config, extra=extra, attend=attend)


def attend(params: Tree, context: Context, query, key, value, **options):
    """`ops.attention` with the layer's sinks."""
    return ops.attention(query, key, value, sinks=params["sinks"], **options)
