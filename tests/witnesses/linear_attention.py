"""Katharopoulos' attention as its recurrence says, and Shen's by lucidrains'
linear-attention-transformer."""

import numpy as np


def witness() -> dict[str, np.ndarray]:
    import torch
    from linear_attention_transformer.linear_attention_transformer import (
        causal_linear_attn,
        linear_attn,
    )

    rng = np.random.default_rng(0)
    B, N, T, H = 2, 3, 14, 8
    arrays = {name: rng.normal(size=(B, T, N, H)) for name in ("query", "key", "value")}
    shown = np.arange(T)[None] < np.array([T, 9])[:, None]
    heads_first = lambda: [
        torch.from_numpy(arrays[n].swapaxes(1, 2).copy()) for n in ("query", "key", "value")
    ]
    numpy = lambda x: x.numpy().swapaxes(1, 2)
    arrays["lengths"] = shown.sum(1)
    arrays["shen"] = numpy(linear_attn(*heads_first()))
    arrays["shen_padded"] = numpy(linear_attn(*heads_first(), kv_mask=torch.from_numpy(shown)))
    arrays["shen_causal"] = numpy(causal_linear_attn(*heads_first(), bucket_size=1))
    phi = torch.nn.functional.elu
    query, key, value = heads_first()
    query, key = phi(query) + 1, phi(key) + 1
    products, sums, outputs = torch.zeros(B, N, H, H).double(), torch.zeros(B, N, H).double(), []
    for t in range(T):
        products = products + key[:, :, t, :, None] * value[:, :, t, None]
        sums = sums + key[:, :, t]
        top, bottom = (
            (query[:, :, t, :, None] * products).sum(2),
            (query[:, :, t] * sums).sum(-1, keepdim=True),
        )
        outputs.append(top / (bottom + 1e-6))
    arrays["elu_causal"] = numpy(torch.stack(outputs, dim=2))
    # the state after all keys
    top, bottom = (
        query @ products,
        (query * sums[:, :, None]).sum(-1, keepdim=True),
    )
    arrays["elu"] = numpy(top / (bottom + 1e-6))
    return arrays
