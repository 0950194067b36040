"""transformers' GPT-Neo, whose layers alternate between all earlier tokens and the last four:
GPT-3's pattern in small."""

import numpy as np

D, N, F, V, LAYERS, WINDOW, EPS = 12, 3, 20, 29, 4, 4, 1e-2


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    from tests.witnesses._redraw import redraw

    config = GPTNeoConfig(
        vocab_size=V,
        hidden_size=D,
        num_layers=LAYERS,
        num_heads=N,
        intermediate_size=F,
        max_position_embeddings=16,
        attention_types=[[["global", "local"], LAYERS // 2]],
        window_size=WINDOW,
        layer_norm_epsilon=EPS,
        activation_function="gelu_new",
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    model = GPTNeoForCausalLM(config).double().eval()
    weights = redraw(model, seed=1)
    tokens = np.random.default_rng(0).integers(0, V, (2, 11))
    logits = model(torch.from_numpy(tokens), use_cache=False).logits
    return {"tokens": tokens, "logits": logits.detach().numpy()} | {
        f"weights/{k}": v for k, v in weights.items()
    }
