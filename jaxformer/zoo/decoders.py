"""Published decoders as configs, whose attention or experts are other files of this package.

    zoo.decoders.gemma3_4b, zoo.PRESETS["gpt_oss_20b"]

Sizes are those of the published weights. The tests compare the numbers of parameters with those
that Hugging Face's classes count.
"""

from dataclasses import replace

from jaxformer.masks import causal, window
from jaxformer.models.blocks import output_norm, sandwich
from jaxformer.models.config import Embedding, ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.models.norm import one_plus_rms_norm
from jaxformer.models.presets import llama_7b, sized
from jaxformer.ops.positions import Linear, Rope, YaRN
from jaxformer.zoo.clamped_mixture import ClampedMixture
from jaxformer.zoo.grouped_experts import GroupedExperts
from jaxformer.zoo.latent_attention import LatentAttention
from jaxformer.zoo.qk_norm import qk_model_norm, qk_norm, qk_norm_full
from jaxformer.zoo.sinks import sinks


def local(width: int):
    """The mask of a layer whose queries see `width` keys."""
    return causal() & window(width - 1)


# Gemma Team 2024, arXiv:2408.00118, table 1. A window in every second layer, from the first on.
gemma2_2b = ModelConfig(
    vocab_size=256_000,
    num_layers=26,
    d_model=2304,
    num_heads=8,
    num_kv_heads=4,
    head_width=256,
    d_ff=9216,
    context_length=8192,
    feedforward="geglu_tanh",
    norm=one_plus_rms_norm,
    norm_eps=1e-6,
    block=sandwich,
    positions=Rope(),
    masks=(local(4096), causal()),
    use_bias=False,
    embedding=Embedding(scale=2304**0.5),
    attention_scale=256**-0.5,
    attention_softcap=50.0,
    logit_softcap=30.0,
)


def gemma(config: ModelConfig, num_layers: int, d_model: int, num_heads: int, **changes):
    """The config in another size. The embedding is scaled by the square root of the width."""
    embedding = Embedding(scale=d_model**0.5)
    return sized(config, num_layers, d_model, num_heads, embedding=embedding, **changes)


gemma2_9b = gemma(gemma2_2b, 42, 3584, 16, num_kv_heads=8, d_ff=14336)
gemma2_27b = gemma(
    gemma2_2b,
    num_layers=46,
    d_model=4608,
    num_heads=32,
    num_kv_heads=16,
    head_width=128,
    d_ff=36864,
    attention_scale=144**-0.5,
)
# Gemma Team 2025, arXiv:2503.19786, table 1, without the images. Five layers with a window, then
# one layer that sees everything, with another rotation.
gemma3_1b = gemma(
    gemma2_2b,
    num_layers=26,
    d_model=1152,
    num_heads=4,
    vocab_size=262_144,
    num_kv_heads=1,
    d_ff=6912,
    context_length=32_768,
    mixer=qk_model_norm,
    positions=(Rope(),) * 5 + (Rope(1e6),),
    masks=(local(512),) * 5 + (causal(),),
    attention_softcap=None,
    logit_softcap=None,
)
_LONG = dict(
    vocab_size=262_208,
    context_length=131_072,
    positions=(Rope(),) * 5 + (Rope(1e6, scaling=Linear(8.0)),),
    masks=(local(1024),) * 5 + (causal(),),
)
gemma3_4b = gemma(gemma3_1b, 34, 2560, 8, num_kv_heads=4, d_ff=10_240, **_LONG)
gemma3_12b = gemma(gemma3_1b, 48, 3840, 16, num_kv_heads=8, d_ff=15_360, **_LONG)
gemma3_27b = gemma(
    gemma3_1b,
    num_layers=62,
    d_model=5376,
    num_heads=32,
    num_kv_heads=16,
    head_width=128,
    d_ff=21_504,
    attention_scale=168**-0.5,
    **_LONG,
)

# Qwen Team 2025, arXiv:2505.09388, tables 1 and 2
qwen3_8b = sized(
    llama_7b,
    num_layers=36,
    d_model=4096,
    num_heads=32,
    vocab_size=151_936,
    num_kv_heads=8,
    head_width=128,
    d_ff=12_288,
    context_length=40_960,
    mixer=qk_norm,
    positions=Rope(1e6),
)
_TIED = dict(tie_embeddings=True)
qwen3_06b = sized(qwen3_8b, 28, 1024, 16, d_ff=3072, **_TIED)
qwen3_1b7 = sized(qwen3_8b, 28, 2048, 16, d_ff=6144, **_TIED)
qwen3_4b = sized(qwen3_8b, 36, 2560, 32, d_ff=9728, **_TIED)
qwen3_14b = sized(qwen3_8b, 40, 5120, 40, d_ff=17_408)
qwen3_32b = sized(qwen3_8b, 64, 5120, 64, d_ff=25_600)
qwen3_30b_a3b = sized(
    qwen3_8b,
    num_layers=48,
    d_model=2048,
    num_heads=32,
    num_kv_heads=4,
    d_ff=6144,
    feedforward=Mixture(128, 8, d_ff=768, balance_loss=0.001),
)
qwen3_235b_a22b = sized(
    qwen3_30b_a3b, 94, 4096, 64, feedforward=Mixture(128, 8, d_ff=1536, balance_loss=0.001)
)

# OLMo et al. 2024, arXiv:2501.00656, table 3, and the release of the 1B and 32B models
olmo2_7b = sized(
    llama_7b,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    vocab_size=100_352,
    context_length=4096,
    block=output_norm,
    mixer=qk_norm_full,
    positions=Rope(5e5),
)
olmo2_1b = sized(olmo2_7b, 16, 2048, 16, d_ff=8192)
olmo2_13b = sized(olmo2_7b, 40, 5120, 40, d_ff=13_824)
olmo2_32b = sized(olmo2_7b, 64, 5120, 40, num_kv_heads=8, d_ff=27_648)

# OpenAI 2025, arXiv:2508.10925, section 2
gpt_oss_20b = ModelConfig(
    vocab_size=201_088,
    num_layers=24,
    d_model=2880,
    num_heads=64,
    num_kv_heads=8,
    head_width=64,
    d_ff=2880,
    context_length=131_072,
    feedforward=ClampedMixture(32, 4),
    norm="rms_norm",
    norm_eps=1e-5,
    mixer=sinks,
    positions=Rope(150_000.0, scaling=YaRN(32.0, 4096, truncate=False)),
    masks=(local(128), causal()),
    use_bias="query|key|value|out",
    tie_embeddings=False,
)
gpt_oss_120b = replace(gpt_oss_20b, num_layers=36, feedforward=ClampedMixture(128, 4))

# DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, without the modules for multi-token prediction
_EXPERTS = GroupedExperts(
    experts=256, top_k=8, groups=8, top_groups=4, d_ff=2048, shared=2048, scale=2.5
)
deepseek_v3 = ModelConfig(
    vocab_size=129_280,
    num_layers=61,
    d_model=7168,
    num_heads=128,
    head_width=192,
    d_ff=18_432,
    context_length=4096,
    feedforward=("swiglu",) * 3 + (_EXPERTS,) * 58,
    norm="rms_norm",
    norm_eps=1e-6,
    mixer=LatentAttention(rank=512, rotated=64, query_rank=1536, value_width=128),
    positions=Rope(layout="interleaved"),
    use_bias=False,
    tie_embeddings=False,
)
