"""A sigmoid of each score instead of the softmax: Ramapuram et al. 2024, arXiv:2409.04431."""

import math

import jax

from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.ops.attention.call import Call, dropout_seed
from jaxformer.ops.attention.kernel import names_of
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.bias import bias_between


def sigmoid(config: ModelConfig, bias: float | None = None) -> Mixer:
    """sigmoid(scores + bias) instead of the softmax. Ramapuram et al. 2024, arXiv:2409.04431.

    The default of `bias` is -log(context_length). With the number of present keys instead, decoding
    and packed rows would be another model. Raises NotImplementedError for another
    `attention_implementation` than the reference.
    """
    names = names_of(config.attention_implementation)
    if names and "reference" not in names:
        missing = f"{', '.join(names)}: no sigmoid attention"
        raise NotImplementedError(f"{missing}; attention_implementation='reference' has it")
    bias = -math.log(config.context_length) if bias is None else bias

    def attend(
        params,
        context,
        query,
        key,
        value,
        *,
        mask,
        return_weights,
        implementation,
        scale,
        dropout_rate,
        dropout_key,
        **options,
    ):
        if {"bias", "positions"} <= options.keys():  # in a cache each row has its own positions
            options["bias"] = bias_between(options["bias"], *options["positions"])
        call = Call(
            mask=mask.sized(key.shape[1]),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            dropout_rate=dropout_rate,
            dropout_seed=dropout_seed(dropout_rate, dropout_key),
            **options,
        )
        out, weights = reference(
            query, key, value, call, lambda scores, sinks: jax.nn.sigmoid(scores + bias)
        )
        return (out, weights) if return_weights else out

    return attention(config, attend=attend)
