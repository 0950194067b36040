"""torch.nn.Transformer, post- and pre-norm, with padded sources; and what
scaled_dot_product_attention takes for granted."""

import numpy as np

D, N, F, LAYERS, EPS = 12, 3, 14, 2, 1e-2


def witness() -> dict[str, np.ndarray]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from tests.witnesses._redraw import redraw

    rng = np.random.default_rng(0)
    B, S, T = 2, 9, 6
    arrays = {
        "source": rng.normal(size=(B, S, D)),
        "target": rng.normal(size=(B, T, D)),
        "lengths": np.array([S, 6]),
    }
    # True hides, in these two masks
    ignored = torch.from_numpy(np.arange(S)[None] >= arrays["lengths"][:, None])
    for name, first in (("post", False), ("pre", True)):
        options = dict(dropout=0.0, batch_first=True, norm_first=first, layer_norm_eps=EPS)
        model = torch.nn.Transformer(D, N, LAYERS, LAYERS, F, **options).double().eval()
        weights = redraw(model, seed=1)  # the same in both: they have the same parameters
        arrays[name] = model(
            torch.from_numpy(arrays["source"]),
            torch.from_numpy(arrays["target"]),
            tgt_mask=model.generate_square_subsequent_mask(T, dtype=torch.float64),
            src_key_padding_mask=ignored,
            memory_key_padding_mask=ignored,
        )
    query, key, value = (
        rng.normal(size=(1, length, heads, 4)) for length, heads in ((3, 4), (5, 2), (5, 2))
    )
    arrays |= {"query": query, "key": key, "value": value}
    heads_first = [torch.from_numpy(x.swapaxes(1, 2).copy()) for x in (query, key, value)]
    visible = np.ones((3, 5), bool)
    visible[1] = False
    options = {
        "is_causal": {"is_causal": True},
        "nothing_seen": {"attn_mask": torch.from_numpy(visible)},
        "grouped": {},
    }
    for name, option in options.items():
        arrays[name] = sdpa(*heads_first, enable_gqa=True, **option).swapaxes(1, 2)
    numpy = lambda x: x.detach().numpy() if isinstance(x, torch.Tensor) else x
    return {name: numpy(x) for name, x in arrays.items()} | {
        f"weights/{name}": x for name, x in weights.items()
    }
