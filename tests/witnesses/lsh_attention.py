"""lucidrains' LSHAttention (reformer-pytorch): causal or not, keys counted once or each time,
within buckets or across."""

import numpy as np

B, T, H, BUCKET, ROUNDS = 2, 32, 6, 4, 2
# (causal, allow_duplicate_attention, attend_across_buckets)
MODES = [(False, True, True), (True, True, True), (True, False, False), (False, False, True)]


def witness() -> dict[str, np.ndarray]:
    import torch
    from reformer_pytorch.reformer_pytorch import LSHAttention

    rng = np.random.default_rng(11)
    query_key, value = 1.5 * rng.normal(size=(B, T, H)), rng.normal(size=(B, T, H))
    torch.manual_seed(3)
    rotations = torch.randn((1, H, ROUNDS, T // BUCKET // 2), dtype=torch.float64).numpy()
    arrays = {"query_key": query_key, "value": value, "rotations": rotations}
    for causal, duplicates, across in MODES:
        options = dict(
            causal=causal, allow_duplicate_attention=duplicates, attend_across_buckets=across
        )
        attention = LSHAttention(bucket_size=BUCKET, n_hashes=ROUNDS, **options).double().eval()
        torch.manual_seed(3)
        with torch.no_grad():
            out = attention(torch.from_numpy(query_key), torch.from_numpy(value))[0]
        arrays[f"out/{causal:d}{duplicates:d}{across:d}"] = out.numpy()
    return arrays
