"""Residual orders: where norms stand, and how sub-layers are added to the residual stream.

`ModelConfig.block` takes one of them, or your own.
"""

from collections.abc import Callable, Mapping, Sequence

from jax import Array
from jaxtyping import Float

from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Block, Context, Tree
from jaxformer.models.norm import norm, norm_spec
from jaxformer.sharding import with_logical_constraint

Stream = Float[Array, "B T D"]
Sublayers = Mapping[str, Callable[[Stream], Stream]]


def pre_norm(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + f(norm(x)) for each sub-layer f, and a norm at the end: GPT-2.

    Radford et al. 2019, section 2.3.
    """

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for name, f in sublayers.items():
            x = add(x, f(norm(config, params[f"{name}_norm"], x)))
        return x

    return Block(
        norms(config, names, "{}_norm"), apply, final_norm_spec(config), end=final_norm(config)
    )


def post_norm(config: ModelConfig, names: Sequence[str]) -> Block:
    """norm(x + f(x)) for each sub-layer f: Vaswani et al. 2017, section 3.1; BERT."""

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for name, f in sublayers.items():
            x = norm(config, params[f"{name}_norm"], add(x, f(x)))
        return x

    return Block(norms(config, names, "{}_norm"), apply)


def sandwich(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + norm(f(norm(x))) for each sub-layer f, and a norm at the end: Gemma 2.

    Ding et al. 2021, arXiv:2105.13290.
    """

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for name, f in sublayers.items():
            y = f(norm(config, params[f"{name}_norm"], x))
            x = add(x, norm(config, params[f"{name}_out_norm"], y))
        return x

    spec = norms(config, names, "{}_norm") | norms(config, names, "{}_out_norm")
    return Block(spec, apply, final_norm_spec(config), end=final_norm(config))


def output_norm(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + norm(f(x)) for each sub-layer f, and a norm at the end: OLMo 2.

    OLMo 2, 2025, arXiv:2501.00656, section 2.1.
    """

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for name, f in sublayers.items():
            x = add(x, norm(config, params[f"{name}_out_norm"], f(x)))
        return x

    return Block(
        norms(config, names, "{}_out_norm"), apply, final_norm_spec(config), end=final_norm(config)
    )


def parallel(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + f(norm(x)) + g(norm(x)): one norm for all sub-layers, and a norm at the end.

    GPT-J: Wang & Komatsuzaki 2021. PaLM: Chowdhery et al. 2022, arXiv:2204.02311, section 2.
    """

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        y = norm(config, params["norm"], x)
        for f in sublayers.values():
            x = add(x, f(y))
        return x

    return Block(
        {"norm": norm_spec(config)}, apply, final_norm_spec(config), end=final_norm(config)
    )


def parallel_norms(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + f(norm_f(x)) + g(norm_g(x)): a norm for each sub-layer, and a norm at the end.

    GPT-NeoX, Pythia: Black et al. 2022, arXiv:2204.06745, section 2.1.
    """

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        out = x
        for name, f in sublayers.items():
            out = add(out, f(norm(config, params[f"{name}_norm"], x)))
        return out

    return Block(
        norms(config, names, "{}_norm"), apply, final_norm_spec(config), end=final_norm(config)
    )


def bare(config: ModelConfig, names: Sequence[str]) -> Block:
    """x + f(x) for each sub-layer f, without norms: for sub-layers that have norms of their own."""

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for f in sublayers.values():
            x = add(x, f(x))
        return x

    return Block({}, apply)


def add(x: Stream, y: Stream) -> Stream:
    """x + y, sharded like the residual stream."""
    return with_logical_constraint(x + y, "batch", "length", None)


def norms(config: ModelConfig, names: Sequence[str], pattern: str) -> Tree:
    """A norm for each sub-layer, under the key `pattern.format(name)`."""
    return {pattern.format(name): norm_spec(config) for name in names}


def final_norm_spec(config: ModelConfig) -> Tree:
    """The norm after the last layer."""
    return {"final_norm": norm_spec(config, config.hidden_width)}


def final_norm(config: ModelConfig) -> Callable:
    """`Block.end`: the norm of `final_norm_spec`."""
    return lambda params, x, context: norm(config, params["final_norm"], x)
