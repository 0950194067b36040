"""x-transformers' attention layers: gates, sigmoid attention, value residual.

Where they are not the papers': sigmoid attention has no bias, and the learned value residual is a
gate a token and head; here its kernel is zero, so that the gate is a number a layer.
"""

import numpy as np

D, N, H, T = 8, 3, 4, 7
KINDS = {  # the seed of its weights, its options
    "gated": (0, dict(gate_values=True)),
    "sigmoid": (2, dict(sigmoid=True)),
    "residual_first": (6, dict()),
    "residual_second": (7, dict(learned_value_residual_mix=True)),
}


def witness() -> dict[str, np.ndarray]:
    import torch
    from x_transformers.x_transformers import Attention

    from tests.witnesses._redraw import redraw

    x = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
    arrays, first = {"x": x}, None
    for name, (seed, options) in KINDS.items():
        layer = Attention(D, dim_head=H, heads=N, causal=True, **options).double().eval()
        weights = redraw(layer, seed)
        if name == "residual_second":
            weights["to_value_residual_mix.0.weight"][:] = 0
            weights["to_value_residual_mix.0.bias"][:] = -0.8
            layer.load_state_dict(
                {k: torch.from_numpy(v) for k, v in weights.items()}, strict=False
            )
        options = {"value_residual": first} if name == "residual_second" else {}
        out, beside = layer(torch.from_numpy(x).double(), return_intermediates=True, **options)
        first = beside.values
        arrays[f"{name}/out"] = out.detach().numpy()
        arrays |= {f"{name}/weights/{k}": v for k, v in weights.items()}
    return arrays
