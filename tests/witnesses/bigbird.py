"""transformers' BigBirdModel: outside training (every random block is block 0), in training
(seeded), and its layouts alone."""

import numpy as np

V, D, N, F, T, BLOCK, R, LAYERS, EPS = 23, 12, 2, 20, 48, 4, 2, 2, 1e-2
# (T, block, r, heads, layer): more blocks than 2 r + 5, as models have; then the lengths of the old
# plan
LAYOUTS = [
    (48, 4, 2, 2, 0),
    (60, 4, 3, 3, 5),
    (1280, 64, 3, 2, 7),
    (832, 64, 3, 4, 11),
    (2048, 64, 3, 2, 6),
]
LAYOUTS += [(1024, 64, 3, 3, 2), (3072, 64, 3, 2, 2), (4096, 64, 3, 2, 9), (1024, 32, 2, 2, 1)]


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import BigBirdModel

    from tests.witnesses._redraw import redraw

    model = BigBirdModel(_config(N, BLOCK, R, T)).double().eval()
    weights = redraw(model, seed=9, gain=1.5)
    tokens = np.random.default_rng(0).integers(1, V, (2, T))
    real = np.arange(T) < np.array([T, 42])[:, None]
    arrays = {"tokens": tokens, "real": real}
    # no dropout: the layout is all that changes
    for name, mode in (
        ("zero", model.eval),
        ("seeded", model.train),
    ):
        mode()
        with torch.no_grad():
            out = model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(real).long())
        arrays |= {
            f"{name}/hidden": out.last_hidden_state.numpy(),
            f"{name}/pooled": out.pooler_output.numpy(),
        }
    arrays |= {f"layout/{'-'.join(map(str, case))}": _layout(*case) for case in LAYOUTS}
    return arrays | {f"weights/{k}": v for k, v in weights.items()}


def _config(heads, block, r, length):
    from transformers import BigBirdConfig

    return BigBirdConfig(
        vocab_size=V,
        hidden_size=D if heads == N else 2 * heads,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=F,
        max_position_embeddings=length,
        type_vocab_size=2,
        sep_token_id=None,
        attention_type="block_sparse",
        block_size=block,
        num_random_blocks=r,
        hidden_act="gelu_new",
        layer_norm_eps=EPS,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _layout(T, block, r, heads, layer):
    """The layout that its attention draws in training, as it draws it."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    attention = BigBirdBlockSparseAttention(_config(heads, block, r, 4096), seed=layer).train()
    np.random.seed(layer)
    if T in (1024, 3072, 4096):
        drawn = [
            attention._bigbird_block_rand_mask(4096, 4096, block, block, r, last_idx=1024)
            for _ in range(heads)
        ]
        return np.stack(drawn)[:, : T // block - 2].astype(np.int16)
    lengths, counts = attention._get_rand_attn_plan(T, block, r)
    plan = dict(plan_from_length=lengths, plan_num_rand_blocks=counts)
    return np.stack(
        attention._bigbird_block_rand_mask_with_head(T, T, block, block, heads, **plan)
    ).astype(np.int16)
