"""transformers' Qwen3, DiffLlama, SmolLM3 and Llama 4 as whole models; the attention layers of OLMo
2 and Qwen3-Next."""

import re

import numpy as np

D, N, K, H, F, V, T, EPS, BASE = 8, 4, 2, 4, 8, 11, 9, 1e-2, 100.0
LAYERS = {"qwen3": 2, "diffllama": 3, "smollm3": 3, "llama4": 3}
CHUNK, FLOOR_SCALE, ATTN_SCALE = 3, 2, 0.7

SIZES = dict(
    hidden_size=D,
    num_attention_heads=N,
    num_key_value_heads=K,
    head_dim=H,
    intermediate_size=F,
    vocab_size=V,
    max_position_embeddings=32,
    rms_norm_eps=EPS,
    rope_parameters={"rope_type": "default", "rope_theta": BASE},
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    attn_implementation="eager",
)


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import (
        DiffLlamaConfig,
        DiffLlamaForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        Olmo2Config,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3NextConfig,
        SmolLM3Config,
        SmolLM3ForCausalLM,
    )  # fmt: skip
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextAttention,
        Qwen3NextRotaryEmbedding,
    )

    rng = np.random.default_rng(0)
    tokens, x = rng.integers(3, V, (2, T)), rng.normal(size=(2, T, D)).astype(np.float32)
    arrays = {"tokens": tokens, "x": x}
    llama4 = SIZES | dict(
        intermediate_size_mlp=F, moe_layers=[], use_qk_norm=False, attention_chunk_size=CHUNK
    )
    llama4 |= dict(floor_scale=FLOOR_SCALE, attn_scale=ATTN_SCALE, no_rope_layer_interval=2)
    models = {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, SIZES),
        "diffllama": (DiffLlamaForCausalLM, DiffLlamaConfig, SIZES),
        "smollm3": (
            SmolLM3ForCausalLM,
            SmolLM3Config,
            SIZES | dict(no_rope_layer_interval=2, tie_word_embeddings=False),
        ),
        "llama4": (Llama4ForCausalLM, Llama4TextConfig, llama4),
    }
    for seed, (name, (model, config, sizes)) in enumerate(models.items()):
        model = model(config(num_hidden_layers=LAYERS[name], **sizes)).double().eval()
        weights = drawn(model, seed)
        logits = model(torch.from_numpy(tokens), use_cache=False).logits
        arrays[f"{name}/logits"] = logits.detach().numpy()
        arrays |= {f"{name}/weights/{k}": v for k, v in weights.items()}

    positions = torch.arange(T)[None]
    hidden = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    layers = {
        "olmo2": (Olmo2Attention, Olmo2RotaryEmbedding, Olmo2Config),
        "qwen3_next": (Qwen3NextAttention, Qwen3NextRotaryEmbedding, Qwen3NextConfig),
    }
    for seed, (name, (layer, rotary, config)) in enumerate(layers.items()):
        # partial_rotary_factor: OLMo 2 turns whole heads whatever it says
        partial = dict(rope_parameters=SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5})
        config = config(num_hidden_layers=1, **SIZES | (partial if name == "qwen3_next" else {}))
        layer = layer(config, layer_idx=0).double().eval()
        weights = drawn(layer, seed)
        x64 = torch.from_numpy(x).double()
        out = layer(x64, rotary(config)(x64, positions), hidden)[0]
        arrays[f"{name}/out"] = out.detach().numpy()
        arrays |= {f"{name}/weights/{k}": v for k, v in weights.items()}
    return arrays


def drawn(module, seed):
    """New weights of 16 bits, which keeps the fixture small, those of layers by name along a first
    axis."""
    import torch

    from tests.witnesses._redraw import redraw

    weights = {name: array.astype(np.float16) for name, array in redraw(module, seed).items()}
    module.load_state_dict(
        {name: torch.from_numpy(array) for name, array in weights.items()}, strict=False
    )
    layers = {}
    for name, array in weights.items():
        layers.setdefault(re.sub(r"layers\.\d+\.", "layers.", name), []).append(array)
    return {
        name: np.stack(arrays) if "layers." in name else arrays[0]
        for name, arrays in layers.items()
    }
