"""x-transformers' attention layers: gates, sigmoid attention, talking heads, memory key/values, value residual.

Where they are not the papers': talking heads add the mixed scores to the unmixed ones, sigmoid attention has no bias, and
the learned value residual is a gate a token and head; here its kernel is zero, so that the gate is a number a layer.
"""

import numpy as np

D, N, H, T, COUNT = 8, 3, 4, 7, 2
KINDS = {
    "gated": dict(gate_values=True),
    "gated_by_head": dict(gate_value_heads=True),
    "sigmoid": dict(sigmoid=True),
    "talking_heads": dict(pre_talking_heads=True, post_talking_heads=True),
    "memory": dict(num_mem_kv=COUNT),
    "memory_window": dict(num_mem_kv=COUNT, max_attend_past=2),
    "residual_first": dict(),
    "residual_second": dict(learned_value_residual_mix=True),
    "memory_alibi": dict(num_mem_kv=COUNT),
}


def witness() -> dict[str, np.ndarray]:
    import torch
    from x_transformers.x_transformers import AlibiPositionalBias, Attention

    from tests.witnesses._redraw import redraw

    x = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
    arrays, first = {"x": x}, None
    for seed, (name, options) in enumerate(KINDS.items()):
        layer = Attention(D, dim_head=H, heads=N, causal=True, **options).double().eval()
        weights = redraw(layer, seed)
        if name == "residual_second":
            weights["to_value_residual_mix.0.weight"][:] = 0
            weights["to_value_residual_mix.0.bias"][:] = -0.8
            layer.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
        options = {"value_residual": first} if name == "residual_second" else {}
        if name == "memory_alibi":
            options["rel_pos"] = AlibiPositionalBias(heads=N, total_heads=N)
        out, beside = layer(torch.from_numpy(x).double(), return_intermediates=True, **options)
        first = beside.values
        arrays[f"{name}/out"] = out.detach().numpy()
        arrays |= {f"{name}/weights/{k}": v for k, v in weights.items()}
    return arrays
