"""Published systems as configs. Parameter counts are checked against other people's implementations in the tests."""

from dataclasses import replace

from jaxformer.masks import causal, chunked, full, window
from jaxformer.models.config import (
    Axial,
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
from jaxformer.models.mixers import BigBird, Linformer, Longformer, Performer, Reformer
from jaxformer.models.mixture import Mixture
from jaxformer.models.stacks.reversible import Reversible
from jaxformer.ops.positions import Rope


def gpt2(num_layers: int, d_model: int, num_heads: int) -> ModelConfig:
    """Radford et al. 2019, table 2."""
    return ModelConfig(
        vocab_size=50257, num_layers=num_layers, d_model=d_model, num_heads=num_heads, context_length=1024,
        dropout_rate=0.1, attention_dropout_rate=0.1,
    )  # fmt: skip


gpt2_small = gpt2(12, 768, 12)
gpt2_medium = gpt2(24, 1024, 16)
gpt2_large = gpt2(36, 1280, 20)
gpt2_xl = gpt2(48, 1600, 25)


def gpt3(num_layers: int, d_model: int, num_heads: int) -> ModelConfig:
    """Brown et al. 2020, arXiv:2005.14165, table 2.1: GPT-2 with context 2048, dense and banded layers in turn.

    The paper does not give the band's width; 256 keys here, as in GPT-Neo. Its 13B row prints a width of 5140, which 40
    heads of 128 do not make; 5120 do.
    """
    return replace(
        gpt2(num_layers, d_model, num_heads), context_length=2048, masks=(causal(), causal() & window(255)),
        dropout_rate=0.0, attention_dropout_rate=0.0,
    )  # fmt: skip


gpt3_125m = gpt3(12, 768, 12)
gpt3_350m = gpt3(24, 1024, 16)
gpt3_760m = gpt3(24, 1536, 16)
gpt3_1b3 = gpt3(24, 2048, 16)
gpt3_2b7 = gpt3(32, 2560, 32)
gpt3_6b7 = gpt3(32, 4096, 32)
gpt3_13b = gpt3(40, 5120, 40)
gpt3_175b = gpt3(96, 12288, 96)


def llama(num_layers: int, d_model: int, num_heads: int, d_ff: int, **changes) -> ModelConfig:
    """Touvron et al. 2023, arXiv:2302.13971, table 2."""
    config = ModelConfig(
        vocab_size=32000, num_layers=num_layers, d_model=d_model, num_heads=num_heads, d_ff=d_ff, context_length=2048,
        feedforward="swiglu", norm="rms_norm", norm_eps=1e-6, positions=Rope(), use_bias=False, tie_embeddings=False,
    )  # fmt: skip
    return replace(config, **changes)


llama_7b = llama(32, 4096, 32, 11008)
llama_13b = llama(40, 5120, 40, 13824)
llama_33b = llama(60, 6656, 52, 17920)
llama_65b = llama(80, 8192, 64, 22016)
# Touvron et al. 2023, arXiv:2307.09288, table 1
llama2_7b = replace(llama_7b, context_length=4096, norm_eps=1e-5)
llama2_70b = llama(80, 8192, 64, 28672, num_kv_heads=8, context_length=4096, norm_eps=1e-5)

# Dubey et al. 2024, arXiv:2407.21783, table 3
llama3_8b = llama(
    32, 4096, 32, 14336, vocab_size=128256, num_kv_heads=8, context_length=8192, norm_eps=1e-5, positions=Rope(500_000.0)
)  # fmt: skip
llama3_70b = replace(llama3_8b, num_layers=80, d_model=8192, num_heads=64, d_ff=28672)
# Jiang et al. 2023, arXiv:2310.06825: a query sees 4,096 keys, itself counted
mistral_7b = llama(
    32, 4096, 32, 14336, num_kv_heads=8, context_length=32768, norm_eps=1e-5, masks=(causal() & window(4095),)
)
# Jiang et al. 2024, arXiv:2401.04088
mixtral_8x7b = replace(
    mistral_7b, feedforward=Mixture(8, 2, balance_loss=0.001), masks=(causal(),), positions=Rope(1_000_000.0)
)
# Yang et al. 2024, arXiv:2407.10671, table 1: biases on queries, keys and values alone
qwen2_7b = llama(
    28, 3584, 28, 18944, vocab_size=152064, num_kv_heads=4, context_length=32768, positions=Rope(1_000_000.0),
    use_bias="query|key|value",
)  # fmt: skip
qwen2_05b = replace(
    qwen2_7b, vocab_size=151936, num_layers=24, d_model=896, num_heads=14, num_kv_heads=2, d_ff=4864, tie_embeddings=True
)  # fmt: skip


# Encoders

MASKED_LM = LanguageModel("gelu", bias=True)
NEXT_SENTENCE = Classification(2, pool="position_0", name="next_sentence")
POOLED = Classification(None, pool="position_0", name="pooled")


def bert(num_layers: int, d_model: int, num_heads: int, **changes) -> ModelConfig:
    """Devlin et al. 2018, arXiv:1810.04805, section 3, under both of its heads; `heads=(POOLED,)` is the encoder alone."""
    config = ModelConfig(
        vocab_size=30522, num_layers=num_layers, d_model=d_model, num_heads=num_heads, context_length=512,
        feedforward="gelu", norm_eps=1e-12, norm_placement="post", masks=(full(),),
        embedding=Embedding(norm=True, token_types=2), heads=(MASKED_LM, NEXT_SENTENCE), dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )  # fmt: skip
    return replace(config, **changes)


bert_base = bert(12, 768, 12)
bert_base_mlm = replace(bert_base, heads=(MASKED_LM,))
bert_base_encoder = replace(bert_base, heads=(POOLED,))
bert_base_cased_encoder = replace(bert_base_encoder, vocab_size=28996)
bert_large = bert(24, 1024, 16)
bert_large_encoder = replace(bert_large, heads=(POOLED,))
# Liu et al. 2019, arXiv:1907.11692: positions behind two rows that padding had
roberta_base = bert(
    12, 768, 12, vocab_size=50265, norm_eps=1e-5, positions=Learned(offset=2), embedding=Embedding(norm=True, token_types=1),
    heads=(POOLED,),
)  # fmt: skip
# Beltagy et al. 2020, arXiv:2004.05150
longformer_base = replace(roberta_base, context_length=4096, mixer=Longformer(512, global_tokens=1))
longformer_base_mlm = replace(longformer_base, heads=(MASKED_LM,))
longformer_large = replace(longformer_base, num_layers=24, d_model=1024, num_heads=16)
# Zaheer et al. 2020, arXiv:2007.14062, internal transformer construction
bigbird_base = bert(
    12, 768, 12, vocab_size=50358, context_length=4096, feedforward="gelu_tanh", mixer=BigBird(64, 3), heads=(POOLED,)
)
bigbird_base_pretraining = replace(bigbird_base, heads=(LanguageModel("gelu_tanh", bias=True), NEXT_SENTENCE))
bigbird_large = replace(bigbird_base, num_layers=24, d_model=1024, num_heads=16)
# Wang et al. 2020, arXiv:2006.04768, section 5: RoBERTa's base with 512 keys seen as 256, E and F shared by heads
linformer_base = replace(roberta_base, mixer=Linformer(256), attention_dropout_rate=0.0)
# Choromanski et al. 2021, arXiv:2009.14794: BERT's base with 256 random features
performer_base = replace(bert_base_encoder, mixer=Performer(256), attention_dropout_rate=0.0)


def reformer(kinds: str, **changes) -> ModelConfig:
    """Kitaev et al. 2020, arXiv:2001.04451, as Hugging Face has it; `kinds` of layers: l for local, h for hashing."""
    local, lsh = causal() & chunked(128, 1), Reformer(chunk=256, rounds=4, buckets=512, duplicates=True)
    config = ModelConfig(
        vocab_size=258, num_layers=12, d_model=1024, num_heads=8, d_ff=4096, context_length=65536, feedforward="relu",
        norm_eps=1e-12, positions=Axial((128, 512), (256, 768)), masks=tuple(local if k == "l" else causal() for k in kinds),
        mixer=tuple(None if k == "l" else lsh for k in kinds), stack=Reversible(streams=2), use_bias="up|down|norm",
        heads=(LanguageModel(bias=True),), tie_embeddings=False,
    )  # fmt: skip
    return replace(config, **changes)


reformer_enwik8 = reformer("llhl")


# Encoder-decoders


def transformer_2017(d_model: int, d_ff: int, num_heads: int, vocab_size: int = 37000, dropout: float = 0.1):
    """Vaswani et al. 2017, arXiv:1706.03762, table 3: post-norm, one token matrix for source, target and output.

    The paper's parameter counts ("65M", "213M") do not follow from its vocabulary; these are those of the architecture.
    """
    stack = ModelConfig(
        vocab_size=vocab_size, num_layers=6, d_model=d_model, num_heads=num_heads, d_ff=d_ff, context_length=512,
        feedforward="relu", norm_placement="post", positions=Sinusoidal(), embedding=Embedding(scale=d_model**0.5),
        dropout_rate=dropout,
    )  # fmt: skip
    return EncoderDecoder(replace(stack, masks=(full(),), heads=()), stack)


transformer_base = transformer_2017(512, 2048, 8)
transformer_big = transformer_2017(1024, 4096, 16, dropout=0.3)
transformer_base_en_fr = transformer_2017(512, 2048, 8, vocab_size=32000)


def t5(num_layers: int, d_model: int, d_ff: int, num_heads: int, head_width: int = 64, **changes) -> EncoderDecoder:
    """Raffel et al. 2020, arXiv:1910.10683, section 3.7: no scale on scores; relative positions that all layers share."""
    encoder = ModelConfig(
        vocab_size=32128, num_layers=num_layers, d_model=d_model, num_heads=num_heads, head_width=head_width, d_ff=d_ff,
        context_length=512, feedforward="relu", norm="rms_norm", norm_eps=1e-6, positions=Relative(), masks=(full(),),
        use_bias=False, heads=(), attention_scale=1.0, dropout_rate=0.1, attention_dropout_rate=0.1,
    )  # fmt: skip
    encoder = replace(encoder, **changes)
    scale = d_model**-0.5 if encoder.tie_embeddings else 1.0
    backwards = Relative(bidirectional=False)
    return EncoderDecoder(
        encoder, replace(encoder, positions=backwards, masks=(causal(),), heads=(LanguageModel(scale=scale),))
    )


t5_small = t5(6, 512, 2048, 8)
t5_base = t5(12, 768, 3072, 12)
t5_large = t5(24, 1024, 4096, 16)
t5_3b = t5(24, 1024, 16384, 32, 128)
t5_11b = t5(24, 1024, 65536, 128, 128)


def t5_v1_1(num_layers: int, d_model: int, d_ff: int, num_heads: int) -> EncoderDecoder:
    """T5 1.1 (Shazeer 2020 in the T5 repository): a gated feed-forward, an output matrix of its own, no dropout in training."""
    changes = dict(feedforward="geglu_tanh", tie_embeddings=False, dropout_rate=0.0, attention_dropout_rate=0.0)
    return t5(num_layers, d_model, d_ff, num_heads, **changes)


t5_v1_1_small = t5_v1_1(8, 512, 1024, 6)
t5_v1_1_base = t5_v1_1(12, 768, 2048, 12)
t5_v1_1_large = t5_v1_1(24, 1024, 2816, 16)
t5_v1_1_xl = t5_v1_1(24, 2048, 5120, 32)
t5_v1_1_xxl = t5_v1_1(24, 4096, 10240, 64)


# Images


def vit(num_layers: int, d_model: int, num_heads: int, patch: int = 16, image: int = 224, **changes) -> ModelConfig:
    """Dosovitskiy et al. 2020, arXiv:2010.11929, table 1, with a linear classifier of 1000 classes on the class token.

    eps and the exact GELU are those of Hugging Face's and timm's weights; the authors' own have 1e-6 and the tanh form.
    """
    patches = Patches((image, image), (patch, patch))
    config = ModelConfig(
        vocab_size=0, num_layers=num_layers, d_model=d_model, num_heads=num_heads, context_length=patches.length,
        feedforward="gelu", norm_eps=1e-12, masks=(full(),), embedding=patches, heads=(Classification(1000, pooler=None),),
    )  # fmt: skip
    return replace(config, **changes)


vit_tiny = vit(12, 192, 3)
vit_small = vit(12, 384, 6)
vit_base = vit(12, 768, 12)
vit_base_32 = vit(12, 768, 12, patch=32)
vit_base_384 = vit(12, 768, 12, image=384)
vit_base_backbone = vit(12, 768, 12, heads=())
vit_base_in21k = vit(12, 768, 12, heads=(POOLED,))
vit_large = vit(24, 1024, 16)
vit_huge = vit(32, 1280, 16, patch=14)

PRESETS: dict[str, ModelConfig | EncoderDecoder] = {
    name: c for name, c in list(globals().items()) if isinstance(c, (ModelConfig, EncoderDecoder))
}
