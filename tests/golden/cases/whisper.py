"""Whisper."""

import numpy as np

from tests.golden.families import Case, pair

FRAMES, MELS = 26, 5


def _frames(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, MELS, FRAMES)).astype(np.float32)


def _case() -> Case:
    config = dict(
        vocab_size=33,
        num_mel_bins=MELS,
        d_model=12,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=17,
        decoder_ffn_dim=14,
        max_source_positions=FRAMES // 2,
        max_target_positions=96,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        activation_function="gelu_new",
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    of_text = pair(33, [13, 9, 10], [8, 6, 8], pad=1, start=2)
    inputs = {name: array for name, array in of_text.items() if name.startswith("decoder_")}
    inputs["input_features"] = _frames(3, 5)
    prompt = {"input_features": _frames(2, 6)}
    return Case("WhisperForConditionalGeneration", config, inputs, prompt, seed=3)


CASES = {"whisper": _case()}
