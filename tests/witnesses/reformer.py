"""transformers' Reformer, local and LSH layers between reversible streams: encoder, decoder, two
hash factors."""

import numpy as np

# heads of width 6 make 12, which is not D
V, D, N, H, F, T, CHUNK, ROUNDS, SEED, EPS = 13, 10, 2, 6, 20, 24, 4, 2, 7, 1e-2
LAYERS = ("local", "lsh", "lsh")
CASES = {"encoder": (False, 6), "decoder": (True, 6), "factored": (True, [4, 2])}


def witness() -> dict[str, np.ndarray]:
    import torch

    tokens = np.random.default_rng(0).integers(1, V, (2, T))
    real = np.arange(T) < np.array([T, 19])[:, None]
    arrays = {"tokens": tokens, "real": real}
    for name, (causal, buckets) in CASES.items():
        model, weights = _model(causal, buckets)
        with torch.no_grad():
            out = model(
                torch.from_numpy(tokens),
                attention_mask=torch.from_numpy(real).long(),
                use_cache=False,
            )
        width = buckets // 2 if isinstance(buckets, int) else sum(buckets) // 2
        torch.manual_seed(SEED)  # as every LSH layer does, which makes all of them hash alike
        rotations = torch.randn((N, H, ROUNDS, width), dtype=torch.float64).numpy()
        arrays |= {f"{name}/logits": out.logits.numpy(), f"{name}/rotations": rotations}
        arrays |= {f"weights/{k.replace('lm_head.decoder', 'head')}": v for k, v in weights.items()}
    return arrays


def _model(causal, buckets):
    from transformers import ReformerConfig, ReformerForMaskedLM, ReformerModelWithLMHead

    from tests.witnesses._redraw import redraw

    config = ReformerConfig(
        vocab_size=V,
        hidden_size=D,
        attention_head_size=H,
        num_attention_heads=N,
        attn_layers=list(LAYERS),
        num_hidden_layers=len(LAYERS),
        feed_forward_size=F,
        axial_pos_embds=True,
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[4, 6],
        lsh_attn_chunk_length=CHUNK,
        local_attn_chunk_length=CHUNK,
        num_buckets=buckets,
        num_hashes=ROUNDS,
        hash_seed=SEED,
        is_decoder=causal,
        hidden_act="relu",
        layer_norm_eps=EPS,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        eos_token_id=2,
        use_cache=False,
    )
    model = (ReformerModelWithLMHead if causal else ReformerForMaskedLM)(config).double().eval()
    return model, redraw(model, seed=10, gain=1.5)
