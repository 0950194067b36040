"""Entries of config.json that change numbers, for a family that does not read them.

Somebody may edit `model_type` to a relative's. Then the relative would ignore what only the right
family reads, and compute other numbers without a word.
"""

import re
import reprlib
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.settings import Json

# {entry that some family reads: the values that change nothing where it is not read}. A null, an
# empty list and an entry that is missing change nothing either.
NEUTRAL: dict[str, tuple] = {
    # factors
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "routed_scaling_factor": (1,),
    "scale_embedding": (False,),
    # positions
    "alibi": (False,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "partial_rotary_factor": (1,),
    "rope_interleave": (False,),
    "rope_local_base_freq": (),
    "rotary_dim": (),
    "rotary_emb_base": (10_000,),
    "rotary_pct": (1,),
    # norms and residual order
    "apply_residual_connection_post_layernorm": (False,),
    "do_layer_norm_before": (True,),
    "parallel_attn": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    # attention
    "kv_lora_rank": (0,),
    "multi_query": (False,),
    "new_decoder_architecture": (False,),
    "use_bidirectional_attention": (False,),
    "clip_qkv": (),
    # experts
    "n_routed_experts": (0, 1),
    "n_group": (0, 1),
    "scoring_func": ("softmax",),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    # settings that transformers reads for every model
    "per_layer_config": ({},),
    "token_classification_bias": (True,),
}


class Recorded(dict):
    """config.json that notes which entries were read."""

    def __init__(self, entries: Json):
        super().__init__(entries)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def check_unread(config: Recorded) -> None:
    """Raises ConfigError for an entry that was not read although it would change numbers."""
    for name, neutral in NEUTRAL.items():
        value = config.get(name) if name not in config.read else None
        if value is None or value == [] or value in neutral:
            continue
        kind = config.get("model_type")
        raise ConfigError(
            f"config.json: {name}={reprlib.repr(value)} changes numbers, but a model of "
            f"model_type={kind!r} does not read it; is this model_type right? "
            f"If it is, delete the entry"
        )


DROPOUTS = re.compile(r"(dropout|dropout_prob|dropout_rate|pdrop|layerdrop|drop_path_rate)$")
OF_HEADS = re.compile(r"classif|^qa_|^summary_")  # a head's own dropout; ours have none
# `model.dropout_rate` acts on the embedding, too
OF_EMBEDDING = ("embd_pdrop", "embed_dropout", "embedding_dropout")


def unread_dropouts(config: Recorded) -> dict[str, Any]:
    """The dropouts that are not 0 and that were not read. They change training, but no answer."""
    dropouts = {name: rate for name, rate in config.items() if DROPOUTS.search(name) and rate}
    rates = [rate for name, rate in dropouts.items() if name in config.read]
    return {
        name: rate
        for name, rate in dropouts.items()
        if name not in config.read
        and not OF_HEADS.search(name)
        and not (name in OF_EMBEDDING and rate in rates)
    }
