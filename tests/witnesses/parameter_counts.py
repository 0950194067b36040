"""How many numbers the published systems have: Hugging Face's classes on torch's meta device, tied
tensors counted once."""

import numpy as np

LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
GPT2 = {
    "gpt2_small": (1024, 12, 768, 12),
    "gpt2_medium": (1024, 24, 1024, 16),
    "gpt2_large": (1024, 36, 1280, 20),
    "gpt2_xl": (1024, 48, 1600, 25),
    "gpt3_125m": (2048, 12, 768, 12),
    "gpt3_350m": (2048, 24, 1024, 16),
    "gpt3_760m": (2048, 24, 1536, 16),
    "gpt3_1b3": (2048, 24, 2048, 16),
    "gpt3_2b7": (2048, 32, 2560, 32),
    "gpt3_6b7": (2048, 32, 4096, 32),
    "gpt3_13b": (2048, 40, 5120, 40),
    "gpt3_175b": (2048, 96, 12288, 96),
}
# hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, num_key_value_heads,
# vocab_size
LLAMA = {
    "llama_7b": (4096, 32, 32, 11008, 32, 32000),
    "llama_13b": (5120, 40, 40, 13824, 40, 32000),
    "llama_33b": (6656, 60, 52, 17920, 52, 32000),
    "llama_65b": (8192, 80, 64, 22016, 64, 32000),
    "llama2_7b": (4096, 32, 32, 11008, 32, 32000),
    "llama2_70b": (8192, 80, 64, 28672, 8, 32000),
    "llama3_8b": (4096, 32, 32, 14336, 8, 128256),
    "llama3_70b": (8192, 80, 64, 28672, 8, 128256),
}
T5 = {  # num_layers, d_model, d_ff, num_heads, d_kv
    "t5_small": (6, 512, 2048, 8, 64),
    "t5_base": (12, 768, 3072, 12, 64),
    "t5_large": (24, 1024, 4096, 16, 64),
    "t5_3b": (24, 1024, 16384, 32, 128),
    "t5_11b": (24, 1024, 65536, 128, 128),
}
T5_V1_1 = {
    "t5_v1_1_small": (8, 512, 1024, 6, 64), "t5_v1_1_base": (12, 768, 2048, 12, 64),
    "t5_v1_1_large": (24, 1024, 2816, 16, 64), "t5_v1_1_xl": (24, 2048, 5120, 32, 64),
    "t5_v1_1_xxl": (24, 4096, 10240, 64, 64),
}  # fmt: skip
# {preset: (layers, width, heads, key heads, head width, inner width, the rest)}
GEMMA2 = {
    "gemma2_2b": (26, 2304, 8, 4, 256, 9216),
    "gemma2_9b": (42, 3584, 16, 8, 256, 14336),
    "gemma2_27b": (46, 4608, 32, 16, 128, 36864),
}
GEMMA3 = {
    "gemma3_1b": (26, 1152, 4, 1, 256, 6912, 262144),
    "gemma3_4b": (34, 2560, 8, 4, 256, 10240, 262208),
    "gemma3_12b": (48, 3840, 16, 8, 256, 15360, 262208),
    "gemma3_27b": (62, 5376, 32, 16, 128, 21504, 262208),
}
QWEN3 = {
    "qwen3_06b": (28, 1024, 16, 8, 128, 3072),
    "qwen3_1b7": (28, 2048, 16, 8, 128, 6144),
    "qwen3_4b": (36, 2560, 32, 8, 128, 9728),
    "qwen3_8b": (36, 4096, 32, 8, 128, 12288),
    "qwen3_14b": (40, 5120, 40, 8, 128, 17408),
    "qwen3_32b": (64, 5120, 64, 8, 128, 25600),
}
QWEN3_MOE = {
    "qwen3_30b_a3b": (48, 2048, 32, 4, 128, 768),
    "qwen3_235b_a22b": (94, 4096, 64, 4, 128, 1536),
}
OLMO2 = {
    "olmo2_1b": (16, 2048, 16, 16, 128, 8192),
    "olmo2_7b": (32, 4096, 32, 32, 128, 11008),
    "olmo2_13b": (40, 5120, 40, 40, 128, 13824),
    "olmo2_32b": (64, 5120, 40, 8, 128, 27648),
}
NAMES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
PYTHIA = {  # layers, width, heads, vocabulary
    "pythia_70m": (6, 512, 8, 50304),
    "pythia_160m": (12, 768, 12, 50304),
    "pythia_410m": (24, 1024, 16, 50304),
    "pythia_1b": (16, 2048, 8, 50304),
    "pythia_1b4": (24, 2048, 16, 50304),
    "pythia_2b8": (32, 2560, 32, 50304),
    "pythia_6b9": (32, 4096, 32, 50432),
    "pythia_12b": (36, 5120, 40, 50688),
}
ALBERT = {  # hidden_size, num_hidden_layers, num_attention_heads
    "albert_base": (768, 12, 12),
    "albert_large": (1024, 24, 16),
    "albert_xlarge": (2048, 24, 16),
    "albert_xxlarge": (4096, 12, 64),
}
ELECTRA = {  # embedding_size, hidden_size, num_hidden_layers, num_attention_heads
    "electra_small": (128, 256, 12, 4),
    "electra_base": (768, 768, 12, 12),
    "electra_large": (1024, 1024, 24, 16),
}
# hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size
DEBERTA = {
    "deberta_v2_xlarge": (1536, 24, 24, 6144, 128_100),
    "deberta_v2_xxlarge": (1536, 48, 24, 6144, 128_100),
    "deberta_v3_xsmall": (384, 12, 6, 1536, 128_100),
    "deberta_v3_small": (768, 6, 12, 3072, 128_100),
    "deberta_v3_base": (768, 12, 12, 3072, 128_100),
    "deberta_v3_large": (1024, 24, 16, 4096, 128_100),
}
VIT = {  # hidden_size, num_hidden_layers, num_attention_heads, patch_size, image_size
    "vit_tiny": (192, 12, 3, 16, 224),
    "vit_small": (384, 12, 6, 16, 224),
    "vit_base": (768, 12, 12, 16, 224),
    "vit_base_32": (768, 12, 12, 32, 224),
    "vit_base_384": (768, 12, 12, 16, 384),
    "vit_large": (1024, 24, 16, 16, 224),
    "vit_huge": (1280, 32, 16, 14, 224),
}
WHISPER = {  # layers of each side, width, heads, mel bins, vocabulary
    "whisper_tiny": (4, 384, 6, 80, 51865),
    "whisper_base": (6, 512, 8, 80, 51865),
    "whisper_small": (12, 768, 12, 80, 51865),
    "whisper_medium": (24, 1024, 16, 80, 51865),
    "whisper_large": (32, 1280, 20, 80, 51865),
    "whisper_large_v3": (32, 1280, 20, 128, 51866),
}


def witness() -> dict[str, np.ndarray]:
    """{preset: number of parameters}."""
    return {name: np.asarray(count(*build)) for name, build in builds().items()}


def count(
    model_class: str, config, less: str = "", more: int = 0, buffers: str | None = None
) -> int:
    """Distinct parameters, without those whose name contains `less`, and with the buffers whose
    name contains `buffers`."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    model.tie_weights()
    sizes = {
        id(p): p.numel() for name, p in model.named_parameters() if not less or less not in name
    }
    if buffers is not None:
        sizes |= {id(b): b.numel() for name, b in model.named_buffers() if buffers in name}
    return sum(sizes.values()) + more


def builds() -> dict[str, tuple]:
    import transformers as t

    found: dict[str, tuple] = {}
    for name, (length, layers, width, heads) in GPT2.items():
        found[name] = (
            "GPT2LMHeadModel",
            t.GPT2Config(n_positions=length, n_layer=layers, n_embd=width, n_head=heads),
        )
    for name, (width, layers, heads, inner, kv, vocab) in LLAMA.items():
        sizes = dict(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
        )
        found[name] = (
            "LlamaForCausalLM",
            t.LlamaConfig(num_key_value_heads=kv, vocab_size=vocab, **sizes),
        )
    sizes = dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    )
    sizes |= dict(num_key_value_heads=8, vocab_size=32000)
    found["mistral_7b"] = "MistralForCausalLM", t.MistralConfig(**sizes)
    found["mixtral_8x7b"] = "MixtralForCausalLM", t.MixtralConfig(**sizes, num_local_experts=8)
    sizes = dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, intermediate_size=18944
    )
    found["qwen2_7b"] = (
        "Qwen2ForCausalLM",
        t.Qwen2Config(**sizes, num_key_value_heads=4, vocab_size=152064),
    )
    found |= later_decoders(t) | later_encoders(t)
    for name, (layers, width, heads, mels, vocab) in WHISPER.items():
        sides = {f"{side}_layers": layers for side in ("encoder", "decoder")}
        sides |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
        sides |= {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
        found[name] = (
            "WhisperForConditionalGeneration",
            t.WhisperConfig(d_model=width, num_mel_bins=mels, vocab_size=vocab, **sides),
        )
    sizes = dict(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864
    )
    sizes |= dict(num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
    found["qwen2_05b"] = "Qwen2ForCausalLM", t.Qwen2Config(**sizes)
    for size, sizes in (("base", {}), ("large", LARGE)):
        found[f"bert_{size}"] = "BertForPreTraining", t.BertConfig(**sizes)
        found[f"bert_{size}_encoder"] = "BertModel", t.BertConfig(**sizes)
        layers = sizes.get("num_hidden_layers", 12)
        long = dict(
            vocab_size=50265,
            max_position_embeddings=4098,
            type_vocab_size=1,
            attention_window=[512] * layers,
        )
        found[f"longformer_{size}"] = "LongformerModel", t.LongformerConfig(**long, **sizes)
        found[f"bigbird_{size}"] = "BigBirdModel", t.BigBirdConfig(**sizes)
    found["bert_base_mlm"] = "BertForMaskedLM", t.BertConfig()
    found["bert_base_cased_encoder"] = "BertModel", t.BertConfig(vocab_size=28996)
    roberta = dict(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    found["roberta_base"] = "RobertaModel", t.RobertaConfig(**roberta)
    long = dict(
        vocab_size=50265,
        max_position_embeddings=4098,
        type_vocab_size=1,
        attention_window=[512] * 12,
    )
    found["longformer_base_mlm"] = "LongformerForMaskedLM", t.LongformerConfig(**long)
    found["bigbird_base_pretraining"] = "BigBirdForPreTraining", t.BigBirdConfig()
    reformer = dict(
        vocab_size=258,
        hidden_size=1024,
        attention_head_size=128,
        num_attention_heads=8,
        feed_forward_size=4096,
        attn_layers=["local", "local", "lsh", "local"] * 3,
        num_hidden_layers=12,
        axial_pos_shape=[128, 512],
        axial_pos_embds_dim=[256, 768],
        max_position_embeddings=65536,
        is_decoder=True,
        num_buckets=512,
    )
    found["reformer_enwik8"] = "ReformerModelWithLMHead", t.ReformerConfig(**reformer)
    marian = {"transformer_base": (512, 2048, 8, 37000), "transformer_big": (1024, 4096, 16, 37000)}
    for name, (width, inner, heads, vocab) in (
        marian | {"transformer_base_en_fr": (512, 2048, 8, 32000)}
    ).items():
        sides = {
            f"{side}_{key}": n
            for side in ("encoder", "decoder")
            for key, n in (("layers", 6), ("ffn_dim", inner))
        }
        config = t.MarianConfig(
            vocab_size=vocab,
            d_model=width,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            **sides,
            pad_token_id=vocab - 1,
            decoder_start_token_id=vocab - 1,
            max_position_embeddings=512,
        )
        found[name] = "MarianMTModel", config, "embed_positions"  # a table of sines, not trained
    for name, (layers, width, inner, heads, head_width) in (T5 | T5_V1_1).items():
        sizes = dict(num_layers=layers, d_model=width, d_ff=inner, num_heads=heads, d_kv=head_width)
        gated = dict(feed_forward_proj="gated-gelu") if name in T5_V1_1 else {}
        # transformers 5 ties the output matrix even where the published weights have their own
        found[name] = (
            "T5ForConditionalGeneration",
            t.T5Config(**sizes, **gated),
            "",
            32128 * width * (name in T5_V1_1),
        )
    for name, (width, layers, heads, patch, image) in VIT.items():
        sizes = dict(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        config = t.ViTConfig(patch_size=patch, image_size=image, num_labels=1000, **sizes)
        found[name] = "ViTForImageClassification", config
    found["vit_base_backbone"] = "ViTForImageClassification", t.ViTConfig(num_labels=0)
    found["vit_base_in21k"] = "ViTModel", t.ViTConfig()
    return found


def later_encoders(t) -> dict[str, tuple]:
    """ALBERT, ELECTRA's discriminators, ModernBERT and DeBERTa-v3."""
    found: dict[str, tuple] = {}
    for name, (width, layers, heads) in ALBERT.items():
        sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
        config = t.AlbertConfig(**sizes, intermediate_size=4 * width)
        found[name] = "AlbertForPreTraining", config
    for name, (narrow, width, layers, heads) in ELECTRA.items():
        sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
        config = t.ElectraConfig(**sizes, embedding_size=narrow, intermediate_size=4 * width)
        found[name] = "ElectraForPreTraining", config
    found["modernbert_base"] = "ModernBertForMaskedLM", t.ModernBertConfig()
    large = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16)
    config = t.ModernBertConfig(**large, intermediate_size=2624)
    found["modernbert_large"] = "ModernBertForMaskedLM", config
    for name, (width, layers, heads, inner, vocab) in DEBERTA.items():
        config = t.DebertaV2Config(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
            vocab_size=vocab,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
            conv_kernel_size=3 if name.startswith("deberta_v2") else 0,
        )
        found[name] = "DebertaV2Model", config
    return found


def later_decoders(t) -> dict[str, tuple]:
    """GPT-1, Llama 3.1, Gemma 2 and 3, Qwen3, OLMo 2, Pythia, gpt-oss and DeepSeek-V3."""

    def named(row: tuple) -> dict:
        return dict(zip(NAMES, row, strict=False))

    found: dict[str, tuple] = {"gpt1": ("OpenAIGPTLMHeadModel", t.OpenAIGPTConfig())}
    large = (126, 16384, 128, 8, 128, 53248, 128256)
    found["llama31_405b"] = "LlamaForCausalLM", t.LlamaConfig(**named(large))
    for name, row in GEMMA2.items():
        found[name] = "Gemma2ForCausalLM", t.Gemma2Config(**named(row))
    for name, row in GEMMA3.items():
        found[name] = "Gemma3ForCausalLM", t.Gemma3TextConfig(**named(row))
    for name, row in QWEN3.items():
        tied = name in ("qwen3_06b", "qwen3_1b7", "qwen3_4b")
        config = t.Qwen3Config(**named(row), vocab_size=151936, tie_word_embeddings=tied)
        found[name] = "Qwen3ForCausalLM", config
    for name, row in QWEN3_MOE.items():
        sizes = named(row)
        sizes["moe_intermediate_size"] = sizes.pop("intermediate_size")
        config = t.Qwen3MoeConfig(**sizes, num_experts=128, vocab_size=151936)
        found[name] = "Qwen3MoeForCausalLM", config
    for name, row in OLMO2.items():
        found[name] = "Olmo2ForCausalLM", t.Olmo2Config(**named(row), vocab_size=100352)
    for name, (layers, width, heads, vocab) in PYTHIA.items():
        config = t.GPTNeoXConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=vocab,
        )
        found[name] = "GPTNeoXForCausalLM", config
    small = t.GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    found["gpt_oss_20b"] = "GptOssForCausalLM", small
    found["gpt_oss_120b"] = "GptOssForCausalLM", t.GptOssConfig()
    found["deepseek_v3"] = "DeepseekV3ForCausalLM", t.DeepseekV3Config()
    return found
