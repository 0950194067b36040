"""transformers' XLNet, read from left to right. It has the relative positions of Transformer-XL,
which that package no longer has, in layers with the norm after each sub-layer."""

import numpy as np

V, D, N, F, LAYERS, EPS = 13, 12, 3, 14, 2, 1e-2


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import XLNetConfig, XLNetModel

    from tests.witnesses._redraw import redraw

    config = XLNetConfig(
        vocab_size=V,
        d_model=D,
        n_layer=LAYERS,
        n_head=N,
        d_inner=F,
        ff_activation="gelu",
        attn_type="uni",
        layer_norm_eps=EPS,
        dropout=0.0,
    )
    model = XLNetModel(config).double().eval()
    weights = redraw(model, seed=1)
    tokens = np.random.default_rng(0).integers(0, V, (2, 9))
    with torch.no_grad():
        hidden = model(torch.from_numpy(tokens)).last_hidden_state.numpy()
    return {"tokens": tokens, "hidden": hidden} | {
        f"weights/{name}": x for name, x in weights.items()
    }
