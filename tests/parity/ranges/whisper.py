"""Whisper."""

import numpy as np

FAMILIES = {"whisper": "Whisper"}
SIDES = ("encoder", "decoder")
RANGE = {"use_weighted_layer_sum": [True], "num_mel_bins": [3, 80]}
NO_NUMBER = (
    "apply_spec_augment",
    "mask_time_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_feature_prob",
    "mask_feature_length",
    "mask_feature_min_masks",
    "median_filter_width",
    "suppress_tokens",
    "begin_suppress_tokens",
    "classifier_proj_size",  # of a class that is refused
)


def sizes(family: str, r, common: dict) -> dict:
    heads = common["num_attention_heads"]
    found = {"vocab_size": common["vocab_size"], "d_model": heads * r.choice([4, 6])}
    found |= {f"{side}_attention_heads": heads for side in SIDES}
    found |= {f"{side}_layers": r.randint(1, 2) for side in SIDES}
    found |= {f"{side}_ffn_dim": r.randint(9, 30) for side in SIDES}
    found |= {"max_source_positions": r.choice([5, 12]), "max_target_positions": r.choice([9, 20])}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return found | tokens


def arguments(name: str, config, r, rng) -> tuple[dict, None]:
    shape = 2, config.num_mel_bins, 2 * config.max_source_positions
    call = {"input_features": rng.normal(size=shape).astype(np.float32)}
    if name.endswith("ForCausalLM"):
        return {"input_ids": rng.integers(0, config.vocab_size, (2, 7))}, None
    if not name.endswith("ForAudioClassification"):
        call["decoder_input_ids"] = rng.integers(0, config.vocab_size, (2, 7))
    return call, None
