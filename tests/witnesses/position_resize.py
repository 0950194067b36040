"""torch's bicubic interpolation, and Hugging Face's ViT run on images of other sizes than its
own."""

import numpy as np

D, N, F, PATCH, EPS = 8, 2, 12, 2, 1e-6
GRIDS = {
    "larger": ((4, 4), (7, 7)),
    "wider": ((4, 4), (3, 9)),
    "smaller": ((5, 3), (2, 2)),
    "line": ((1, 6), (2, 11)),
}
# in patches of 2: from 4 x 4
IMAGES = {
    "own": (8, 8),
    "larger": (14, 14),
    "wider": (6, 12),
    "as_many": (4, 16),
}


def witness() -> dict[str, np.ndarray]:
    import torch
    from transformers import ViTConfig, ViTModel

    from tests.witnesses._redraw import redraw

    rng = np.random.default_rng(0)
    arrays = {}
    for name, (old, new) in GRIDS.items():
        arrays[f"table/{name}"] = rng.normal(size=(*old, 3))
        table = torch.from_numpy(arrays[f"table/{name}"]).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            table, size=new, mode="bicubic", align_corners=False
        )
        arrays[f"resized/{name}"] = resized[0].permute(1, 2, 0).numpy()
    config = ViTConfig(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=N,
        intermediate_size=F,
        image_size=8,
        patch_size=PATCH,
        layer_norm_eps=EPS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = ViTModel(config, add_pooling_layer=False).double().eval()
    weights = redraw(model, seed=1)
    for name, size in IMAGES.items():
        arrays[f"image/{name}"] = rng.normal(size=(1, 3, *size)).astype(np.float32)
        with torch.no_grad():
            image = torch.from_numpy(arrays[f"image/{name}"]).double()
            arrays[f"hidden/{name}"] = model(
                image, interpolate_pos_encoding=True
            ).last_hidden_state.numpy()
    return arrays | {f"weights/{name}": x for name, x in weights.items()}
