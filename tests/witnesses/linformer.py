"""lucidrains' linformer: the three ways of sharing, on a sequence shorter than the one its
projections were made for."""

import numpy as np


def witness() -> dict[str, np.ndarray]:
    import torch
    from linformer.linformer import LinformerSelfAttention

    from tests.witnesses._redraw import redraw

    x = np.random.default_rng(0).normal(size=(2, 11, 12))
    arrays = {"x": x}
    for name, options in (
        ("headwise", {}),
        ("one_kv_head", {"one_kv_head": True}),
        ("key_value", {"share_kv": True}),
    ):
        module = LinformerSelfAttention(12, seq_len=17, k=5, heads=3, **options).double().eval()
        weights = redraw(module, seed=1, gain=2.0)
        arrays |= {f"{name}/{key}": value for key, value in weights.items()}
        arrays[f"{name}/out"] = module(torch.from_numpy(x)).detach().numpy()
    return arrays
