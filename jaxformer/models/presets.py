"""Published systems as configs. The config of a paper in zoo/ is in that paper's file.

Parameter counts are checked against other people's implementations in the tests.
"""

from dataclasses import replace

from jaxformer.masks import causal, full, window
from jaxformer.models.blocks import parallel, parallel_norms, post_norm
from jaxformer.models.config import (
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
)
from jaxformer.models.mixture import Mixture
from jaxformer.ops.positions import Llama3, Rope


def sized(
    config: ModelConfig, num_layers: int, d_model: int, num_heads: int, **changes
) -> ModelConfig:
    """The config in another size."""
    return replace(config, num_layers=num_layers, d_model=d_model, num_heads=num_heads, **changes)


# Radford et al. 2018, "Improving language understanding by generative pre-training", section 4.1
gpt1 = ModelConfig(
    vocab_size=40478,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=512,
    block=post_norm,
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
)

# Radford et al. 2019, table 2
gpt2_small = ModelConfig(
    vocab_size=50257,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=1024,
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
)
gpt2_medium = sized(gpt2_small, 24, 1024, 16)
gpt2_large = sized(gpt2_small, 36, 1280, 20)
gpt2_xl = sized(gpt2_small, 48, 1600, 25)

# Brown et al. 2020, arXiv:2005.14165, table 2.1: dense and banded layers in turn. The paper does
# not give the band's width; it is 256 keys here, as in GPT-Neo. The paper's 13B row prints a width
# of 5140, but 40 heads of 128 make 5120.
gpt3_125m = replace(
    gpt2_small,
    context_length=2048,
    masks=(causal(), causal() & window(255)),
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
)
gpt3_350m = sized(gpt3_125m, 24, 1024, 16)
gpt3_760m = sized(gpt3_125m, 24, 1536, 16)
gpt3_1b3 = sized(gpt3_125m, 24, 2048, 16)
gpt3_2b7 = sized(gpt3_125m, 32, 2560, 32)
gpt3_6b7 = sized(gpt3_125m, 32, 4096, 32)
gpt3_13b = sized(gpt3_125m, 40, 5120, 40)
gpt3_175b = sized(gpt3_125m, 96, 12288, 96)

# Touvron et al. 2023, arXiv:2302.13971, table 2
llama_7b = ModelConfig(
    vocab_size=32000,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    d_ff=11008,
    context_length=2048,
    feedforward="swiglu",
    norm="rms_norm",
    norm_eps=1e-6,
    positions=Rope(),
    use_bias=False,
    tie_embeddings=False,
)
llama_13b = sized(llama_7b, 40, 5120, 40, d_ff=13824)
llama_33b = sized(llama_7b, 60, 6656, 52, d_ff=17920)
llama_65b = sized(llama_7b, 80, 8192, 64, d_ff=22016)
# Touvron et al. 2023, arXiv:2307.09288, table 1
llama2_7b = replace(llama_7b, context_length=4096, norm_eps=1e-5)
llama2_70b = sized(llama2_7b, 80, 8192, 64, d_ff=28672, num_kv_heads=8)
# Dubey et al. 2024, arXiv:2407.21783, table 3
llama3_8b = replace(
    llama2_7b,
    vocab_size=128256,
    num_kv_heads=8,
    d_ff=14336,
    context_length=8192,
    positions=Rope(500_000.0),
)
llama3_70b = sized(llama3_8b, 80, 8192, 64, d_ff=28672)
llama31_405b = sized(
    llama3_8b,
    num_layers=126,
    d_model=16_384,
    num_heads=128,
    d_ff=53_248,
    context_length=131_072,
    positions=Rope(500_000.0, scaling=Llama3(8.0, 8192, 1.0, 4.0)),
)
# Jiang et al. 2023, arXiv:2310.06825: a query sees 4,096 keys, including its own position
mistral_7b = replace(
    llama2_7b, num_kv_heads=8, d_ff=14336, context_length=32768, masks=(causal() & window(4095),)
)
# Jiang et al. 2024, arXiv:2401.04088
mixtral_8x7b = replace(
    mistral_7b,
    feedforward=Mixture(8, 2, balance_loss=0.001),
    masks=(causal(),),
    positions=Rope(1e6),
)
# Yang et al. 2024, arXiv:2407.10671, table 1: only queries, keys and values have biases
qwen2_7b = sized(
    llama_7b,
    num_layers=28,
    d_model=3584,
    num_heads=28,
    vocab_size=152064,
    num_kv_heads=4,
    d_ff=18944,
    context_length=32768,
    positions=Rope(1_000_000.0),
    use_bias="query|key|value",
)
qwen2_05b = sized(
    qwen2_7b, 24, 896, 14, vocab_size=151936, num_kv_heads=2, d_ff=4864, tie_embeddings=True
)

# Biderman et al. 2023, arXiv:2304.01373, table 1. The vocabulary is padded to a multiple of 128
# times the number of devices that split it, so larger models have more rows.
pythia_70m = ModelConfig(
    vocab_size=50_304,
    num_layers=6,
    d_model=512,
    num_heads=8,
    context_length=2048,
    feedforward="gelu",
    block=parallel_norms,
    positions=Rope(fraction=0.25),
    tie_embeddings=False,
)
pythia_160m = sized(pythia_70m, 12, 768, 12)
pythia_410m = sized(pythia_70m, 24, 1024, 16)
pythia_1b = sized(pythia_70m, 16, 2048, 8)
pythia_1b4 = sized(pythia_70m, 24, 2048, 16)
pythia_2b8 = sized(pythia_70m, 32, 2560, 32)
pythia_6b9 = sized(pythia_70m, 32, 4096, 32, vocab_size=50_432)
pythia_12b = sized(pythia_70m, 36, 5120, 40, vocab_size=50_688)

# Chowdhery et al. 2022, arXiv:2204.02311, section 2 and table 1: one head of keys and values. Maps
# and norms have no biases.
palm_8b = ModelConfig(
    vocab_size=256_000,
    num_layers=32,
    d_model=4096,
    num_heads=16,
    num_kv_heads=1,
    head_width=256,
    context_length=2048,
    feedforward="swiglu",
    block=parallel,
    positions=Rope(),
    use_bias=False,
)
palm_62b = sized(palm_8b, 64, 8192, 32)
palm_540b = sized(palm_8b, 118, 18_432, 48)

# Encoders
MASKED_LM = LanguageModel("gelu", bias=True)
NEXT_SENTENCE = Classification(2, pool="position_0", name="next_sentence")
POOLED = Classification(None, pool="position_0", name="pooled")

# Devlin et al. 2018, arXiv:1810.04805, section 3, with both pre-training heads
bert_base = ModelConfig(
    vocab_size=30522,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=512,
    feedforward="gelu",
    norm_eps=1e-12,
    block=post_norm,
    masks=(full(),),
    embedding=Embedding(norm=True, token_types=2),
    heads=(MASKED_LM, NEXT_SENTENCE),
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
)
bert_base_mlm = replace(bert_base, heads=(MASKED_LM,))
bert_base_encoder = replace(bert_base, heads=(POOLED,))
bert_base_cased_encoder = replace(bert_base_encoder, vocab_size=28996)
bert_large = sized(bert_base, 24, 1024, 16)
bert_large_encoder = replace(bert_large, heads=(POOLED,))
# Liu et al. 2019, arXiv:1907.11692: two rows, once for padding, stand before the positions
roberta_base = replace(
    bert_base_encoder,
    vocab_size=50265,
    norm_eps=1e-5,
    positions=Learned(offset=2),
    embedding=Embedding(norm=True, token_types=1),
)


# Encoder-decoders
def transformer_2017(
    d_model: int, d_ff: int, num_heads: int, vocab_size: int = 37000, dropout: float = 0.1
):
    """Vaswani et al. 2017, arXiv:1706.03762, table 3: post-norm, one token table for all uses.

    The uses are source, target and output. The paper's parameter counts ("65M", "213M") do not
    follow from its vocabulary; the counts here are those of the architecture.
    """
    stack = ModelConfig(
        vocab_size=vocab_size,
        num_layers=6,
        d_model=d_model,
        num_heads=num_heads,
        context_length=512,
        d_ff=d_ff,
        feedforward="relu",
        block=post_norm,
        positions=Sinusoidal(),
        embedding=Embedding(scale=d_model**0.5),
        dropout_rate=dropout,
    )
    return EncoderDecoder(replace(stack, masks=(full(),), heads=()), stack)


transformer_base = transformer_2017(512, 2048, 8)
transformer_big = transformer_2017(1024, 4096, 16, dropout=0.3)
transformer_base_en_fr = transformer_2017(512, 2048, 8, vocab_size=32000)


def t5(
    num_layers: int, d_model: int, d_ff: int, num_heads: int, head_width: int = 64, **changes
) -> EncoderDecoder:
    """T5: relative positions that all layers share, and no scale on scores.

    Raffel et al. 2020, arXiv:1910.10683, section 3.7.
    """
    encoder = ModelConfig(
        vocab_size=32128,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        context_length=512,
        head_width=head_width,
        d_ff=d_ff,
        feedforward="relu",
        norm="rms_norm",
        norm_eps=1e-6,
        positions=Relative(),
        masks=(full(),),
        use_bias=False,
        heads=(),
        attention_scale=1.0,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )
    encoder = replace(encoder, **changes)
    head = LanguageModel(scale=d_model**-0.5 if encoder.tie_embeddings else 1.0)
    backwards = Relative(bidirectional=False)
    return EncoderDecoder(
        encoder, replace(encoder, positions=backwards, masks=(causal(),), heads=(head,))
    )


t5_small = t5(6, 512, 2048, 8)
t5_base = t5(12, 768, 3072, 12)
t5_large = t5(24, 1024, 4096, 16)
t5_3b = t5(24, 1024, 16384, 32, 128)
t5_11b = t5(24, 1024, 65536, 128, 128)

# T5 1.1 (Shazeer 2020, in the T5 repository): a gated feed-forward, an output matrix of its own,
# and no dropout in training
_V1_1 = dict(
    feedforward="geglu_tanh", tie_embeddings=False, dropout_rate=0.0, attention_dropout_rate=0.0
)
t5_v1_1_small = t5(8, 512, 1024, 6, **_V1_1)
t5_v1_1_base = t5(12, 768, 2048, 12, **_V1_1)
t5_v1_1_large = t5(24, 1024, 2816, 16, **_V1_1)
t5_v1_1_xl = t5(24, 2048, 5120, 32, **_V1_1)
t5_v1_1_xxl = t5(24, 4096, 10240, 64, **_V1_1)


# Images
def cut(config: ModelConfig, image: int, patch: int) -> ModelConfig:
    """The config for square images of side `image`, in square patches of side `patch`."""
    patches = Patches((image, image), (patch, patch))
    return replace(config, context_length=patches.length, embedding=patches)


# Dosovitskiy et al. 2020, arXiv:2010.11929, table 1, with a linear classifier of 1000 classes on
# the class token. eps and the exact GELU are those of the weights of Hugging Face and timm; the
# authors' own weights have 1e-6 and the tanh form.
vit_base = ModelConfig(
    vocab_size=0,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=197,
    feedforward="gelu",
    norm_eps=1e-12,
    masks=(full(),),
    embedding=Patches(),
    heads=(Classification(1000, pooler=None),),
)
vit_tiny = sized(vit_base, 12, 192, 3)
vit_small = sized(vit_base, 12, 384, 6)
vit_base_32 = cut(vit_base, 224, 32)
vit_base_384 = cut(vit_base, 384, 16)
vit_base_backbone = replace(vit_base, heads=())
vit_base_in21k = replace(vit_base, heads=(Classification(None, name="pooled"),))
vit_large = sized(vit_base, 24, 1024, 16)
vit_huge = sized(cut(vit_base, 224, 14), 32, 1280, 16)

PRESETS = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, ModelConfig | EncoderDecoder)
}
