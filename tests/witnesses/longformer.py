"""transformers' LongformerModel on padded rows, with and without global tokens, in a window that
does not divide them."""

import numpy as np

V, D, N, F, WINDOWS, EPS = 23, 15, 3, 20, (4, 8), 1e-2


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import LongformerConfig, LongformerModel

    from tests.witnesses._redraw import redraw

    config = LongformerConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=len(WINDOWS),
        num_attention_heads=N,
        intermediate_size=F,
        max_position_embeddings=26,
        type_vocab_size=1,
        attention_window=list(WINDOWS),
        pad_token_id=1,
        layer_norm_eps=EPS,
        hidden_act="gelu",
    )
    model = LongformerModel(config).double().eval()
    weights = redraw(model, seed=8, gain=1.5)
    tokens = np.random.default_rng(0).integers(2, V, (2, 21))
    real = np.arange(21) < np.array([21, 16])[:, None]
    tokens[~real] = 1
    flags = np.zeros(tokens.shape, bool)
    flags[0, [0, 7]] = flags[1, [0, 3, 5]] = True  # another number in each row
    arrays = {"tokens": tokens, "real": real, "flags": flags}
    for name, marked in (("global", torch.from_numpy(flags).long()), ("local", None)):
        inputs = dict(attention_mask=torch.from_numpy(real).long(), global_attention_mask=marked)
        with torch.no_grad():
            out = model(torch.from_numpy(tokens), **inputs)
        arrays |= {
            f"{name}/hidden": out.last_hidden_state.numpy(),
            f"{name}/pooled": out.pooler_output.numpy(),
        }
    return arrays | {f"weights/{k}": v for k, v in weights.items()}
