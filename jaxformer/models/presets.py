"""Published systems as configs. Parameter counts are checked against other people's implementations in the tests."""

from dataclasses import replace

from jaxformer.masks import causal, window
from jaxformer.models.config import ModelConfig
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
    pattern = (causal(), causal() & window(255))
    return replace(
        gpt2(num_layers, d_model, num_heads),
        context_length=2048,
        masks=pattern,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )


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
llama2_70b = llama(80, 8192, 64, 28672, num_kv_heads=8, context_length=4096, norm_eps=1e-5)

PRESETS: dict[str, ModelConfig] = {name: c for name, c in list(globals().items()) if isinstance(c, ModelConfig)}
