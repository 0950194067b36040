"""How many numbers the published vision models and towers have: Hugging Face's classes on torch's
meta device."""

import numpy as np

from tests.witnesses.parameter_counts import count

IMAGE_224 = dict(image_size=224, num_channels=3)

DINOV2 = {  # hidden_size, num_hidden_layers, num_attention_heads
    "dinov2_small": (384, 12, 6),
    "dinov2_base": (768, 12, 12),
    "dinov2_large": (1024, 24, 16),
    "dinov2_giant": (1536, 40, 24),
}
DEIT = {"deit_tiny": (192, 3), "deit_small": (384, 6), "deit_base": (768, 12)}  # width, heads
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CLIP_VISION = {  # of NAMES, and patch_size, projection_dim
    "clip_base_32_vision": (768, 3072, 12, 12, 32, 512),
    "clip_base_16_vision": (768, 3072, 12, 12, 16, 512),
    "clip_large_14_vision": (1024, 4096, 24, 16, 14, 768),
}
CLIP_TEXT = {
    "clip_base_32_text": (512, 2048, 12, 8, 512),
    "clip_large_14_text": (768, 3072, 12, 12, 768),
    "clip_huge_14_text": (1024, 4096, 24, 16, 1024),
}
SIGLIP = {  # of NAMES, and patch_size, image_size
    "siglip_base_16_224": (768, 3072, 12, 12, 16, 224),
    "siglip_large_16_256": (1024, 4096, 24, 16, 16, 256),
    "siglip_so400m_14_384": (1152, 4304, 27, 16, 14, 384),
}
VIT_MAE = {  # of NAMES, and patch_size
    "vit_mae_base": (768, 3072, 12, 12, 16),
    "vit_mae_large": (1024, 4096, 24, 16, 16),
    "vit_mae_huge": (1280, 5120, 32, 16, 14),
}

DETR = {  # depths of the backbone, classes
    "detr_r50": ([3, 4, 6, 3], 91),
    "detr_r101": ([3, 4, 23, 3], 91),
    "detr_r50_panoptic": ([3, 4, 6, 3], 250),  # without its head of masks
}


def settings() -> dict[str, tuple[str, str, dict]]:
    """{name: (model_type, class of transformers, its settings)}."""
    found: dict[str, tuple[str, str, dict]] = {}
    for name, (width, layers, heads) in DINOV2.items():
        own = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
        own |= dict(image_size=518, patch_size=14, use_swiglu_ffn=name == "dinov2_giant")
        found[name] = "dinov2", "Dinov2Model", own
    for name, (width, heads) in DEIT.items():
        own = dict(zip(NAMES, (width, 4 * width, 12, heads), strict=True)) | dict(num_labels=1000)
        found[name] = "deit", "DeiTForImageClassificationWithTeacher", own | IMAGE_224
    for name, row in CLIP_VISION.items():
        own = dict(zip((*NAMES, "patch_size", "projection_dim"), row, strict=True))
        found[name] = "clip_vision_model", "CLIPVisionModelWithProjection", own
    for name, row in CLIP_TEXT.items():
        own = dict(zip((*NAMES, "projection_dim"), row, strict=True)) | dict(eos_token_id=2)
        found[name] = "clip_text_model", "CLIPTextModelWithProjection", own
    for name, row in SIGLIP.items():
        own = dict(zip((*NAMES, "patch_size", "image_size"), row, strict=True))
        found[f"{name}_vision"] = "siglip_vision_model", "SiglipVisionModel", own
        of_text = dict(zip(NAMES, row, strict=False))
        found[f"{name}_text"] = "siglip_text_model", "SiglipTextModel", of_text
    for name, row in VIT_MAE.items():
        own = dict(zip((*NAMES, "patch_size"), row, strict=True))
        found[name] = "vit_mae", "ViTMAEForPreTraining", own
    for name, (depths, classes) in DETR.items():
        own = dict(backbone_config=dict(model_type="resnet", depths=depths), num_labels=classes)
        found[name] = "detr", "DetrForObjectDetection", own
    found["detr_r50_bare"] = "detr", "DetrModel", dict(backbone_config=dict(model_type="resnet"))
    return found


def witness() -> dict[str, np.ndarray]:
    """{name: number of parameters}. The frozen norms of DETR, which are buffers there, count."""
    import transformers

    return {
        name: np.asarray(
            count(
                model,
                getattr(transformers, model).config_class(**own),
                buffers="backbone" if kind == "detr" else None,
            )
        )
        for name, (kind, model, own) in settings().items()
    }
