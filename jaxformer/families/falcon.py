"""Falcon: Almazrouei et al. 2023, arXiv:2311.16867.

Sub-layers side by side or one after the other, one or all key heads, rotations or ALiBi.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.families.classes import DECODER_TASKS, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import NORMS, QUERY_KEY_VALUE
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.models.blocks import parallel, parallel_norms
from jaxformer.models.config import ModelConfig
from jaxformer.ops.bias import Bias

PREFIX = "transformer."
FIELDS = COMMON | {
    "context_length": Key("max_position_embeddings", 2048),
    "d_ff": Key("ffn_hidden_size", None),
    "feedforward": Key("activation", "gelu", ACTIVATION),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "dropout_rate": Key("hidden_dropout", 0.0),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}


def falcon_alibi(config: ModelConfig) -> Bias:
    """m_n j / sqrt(H) for key j: ALiBi before the scores are scaled, computed in bfloat16.

    Its rounding depends on the position of the key, so it is no bias of distance.
    """
    (slopes,) = ops.alibi(config.num_heads).args
    return Bias(_rounded_alibi, (slopes, config.head_size))


def _rounded_alibi(bias: Bias, q_positions: Array, kv_positions: Array) -> Array:
    slopes, head_width = bias.args
    rounded = np.asarray(slopes, jnp.bfloat16).astype(np.float32)[:, None, None]
    keys = _bfloat16(kv_positions.astype(jnp.float32))
    scores = _bfloat16(keys[None, None] * rounded) / head_width**0.5
    return jnp.broadcast_to(scores, (len(slopes), len(q_positions), len(kv_positions)))


def _bfloat16(x: Array) -> Array:
    """x in the precision of bfloat16, which a compiler may not skip."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    N = fields["num_heads"]
    has_alibi = get(c, "alibi", False)
    return ModelConfig(
        **fields,
        num_kv_heads=_read_kv_heads(c, N),
        block=_read_block(c),
        positions=falcon_alibi if has_alibi else read_rope(c, fields["d_model"] // N),
        use_bias=True if get(c, "bias", False) else "norm",
        heads=read_heads(c, "Falcon", heads_of_decoder(c)),
    )


def _read_kv_heads(c: Json, num_heads: int) -> int:
    """Any number in the new architecture, otherwise one or all."""
    is_multi_query = get(c, "multi_query", True)
    if get(c, "new_decoder_architecture", False):
        return get(c, "num_kv_heads", num_heads)
    if is_multi_query:
        return 1
    only(c, num_kv_heads=num_heads)
    return num_heads


def _read_block(c: Json) -> Callable | None:
    """One norm for both sub-layers, a norm for each (the new architecture), or no parallel ones."""
    is_new, is_parallel = get(c, "new_decoder_architecture", False), get(c, "parallel_attn", True)
    count = get(c, "num_ln_in_parallel_attn", 2 if is_new else 1)
    if is_new:
        only(c, parallel_attn=True)
    if not is_parallel:
        return None
    # their old architecture has one norm whatever the number is, but fails for 2
    if count not in (1, 2) if is_new else count == 2:
        raise ConfigError(
            f"config.json: num_ln_in_parallel_attn={count} with "
            f"new_decoder_architecture={is_new} is not supported here"
        )
    return parallel_norms if count == 2 else parallel


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, FIELDS) | write_heads(config.heads, "Falcon", heads_of_decoder({}))
    N, K = config.num_heads, config.kv_heads
    is_new = config.block is parallel_norms or K not in (1, N)
    c |= {"new_decoder_architecture": is_new, "multi_query": is_new or K == 1}
    c |= {"num_kv_heads": K if is_new else N, "parallel_attn": config.block is not None}
    norms = 2 if config.block is parallel_norms else 1
    c["num_ln_in_parallel_attn"] = norms if is_new else None
    c |= {"alibi": config.positions is falcon_alibi, "bias": config.has_bias("out")}
    return c | write_rope(config.positions)


LAYER = PREFIX + "h.{}."
LINEAR = {
    "attention/out": "self_attention.dense",
    "feedforward/up": "mlp.dense_h_to_4h",
    "feedforward/down": "mlp.dense_4h_to_h",
}
MODEL = {"embedding/tokens": "word_embeddings.weight", "final_norm": "ln_f"}
ONE_NORM = {"norm": "input_layernorm"}
TWO_NORMS = {"attention_norm": "ln_attn", "feedforward_norm": "ln_mlp"}


def _rules(config: Any) -> list[Rule]:
    norms = {None: NORMS, parallel: ONE_NORM, parallel_norms: TWO_NORMS}[config.block]
    return [
        Rule(QUERY_KEY_VALUE, LAYER + "self_attention.query_key_value", "by_head"),
        *rules("layers/", LAYER, LINEAR | norms),
        *rules("", PREFIX, MODEL),
        *rules("heads/", "", DECODER_TASKS | {"language_model/kernel": "lm_head.weight"}),
    ]


FAMILIES = {
    "falcon": Family(
        read=_read,
        write=_write,
        rules=_rules,
        prefix=PREFIX,
        ignored=r"\.(rotary_emb|maybe_rotary|rotary)\.inv_freq$",  # buffers of old files
        aliases={"lm_head.weight": PREFIX + "word_embeddings.weight"},
        other_names={"n_embed": "hidden_size"},
    ),
}
