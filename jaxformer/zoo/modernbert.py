"""ModernBERT: a first layer whose attention has no norm, since a norm ends the embedding.

Warner et al. 2024, arXiv:2412.13663, section 2.1. Every third layer sees all tokens, the others a
window; the two kinds rotate by other bases.
"""

from collections.abc import Callable, Sequence

from jaxformer.masks import full, window
from jaxformer.models.blocks import (
    Stream,
    Sublayers,
    add,
    final_norm,
    final_norm_spec,
    norms,
    pre_norm,
)
from jaxformer.models.config import Embedding, LanguageModel, ModelConfig
from jaxformer.models.layer import Block, Context, Tree
from jaxformer.models.norm import norm
from jaxformer.models.presets import sized
from jaxformer.ops.positions import Rope
from jaxformer.zoo.projection import Projection


def bare_attention(config: ModelConfig, names: Sequence[str]) -> Block:
    """`blocks.pre_norm` without the norm of the first sub-layer: x + f(x), then x + g(norm(x))."""
    first, *others = names

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        x = add(x, sublayers[first](x))
        for name in others:
            x = add(x, sublayers[name](norm(config, params[f"{name}_norm"], x)))
        return x

    return Block(
        norms(config, others, "{}_norm"), apply, final_norm_spec(config), end=final_norm(config)
    )


def bare_first(num_layers: int) -> tuple[Callable, ...]:
    """The blocks of a stack whose first layer alone is `bare_attention`."""
    return (bare_attention, *[pre_norm] * (num_layers - 1))


# Warner et al. 2024, table 4
modernbert_base = ModelConfig(
    vocab_size=50_368,
    num_layers=22,
    d_model=768,
    num_heads=12,
    d_ff=1152,
    context_length=8192,
    feedforward="geglu",
    block=bare_first(22),
    positions=(Rope(160_000.0), Rope(), Rope()),
    masks=(full(), window(64, 64), window(64, 64)),
    use_bias=False,
    embedding=Embedding(norm=True),
    heads=(LanguageModel(Projection("gelu", bias=False), bias=True),),
)
modernbert_large = sized(modernbert_base, 28, 1024, 16, d_ff=2624, block=bare_first(28))
