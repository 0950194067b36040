"""A transformer stack: embed the tokens, run the layers, read the heads.

`functools.partial(models.apply, config)` is an ordinary function f(params, tokens).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxformer import ops, params
from jaxformer.errors import ConfigError
from jaxformer.models import embedding, heads
from jaxformer.models.config import ModelConfig
from jaxformer.models.inputs import Inputs, Output
from jaxformer.models.layer import Block, Layers
from jaxformer.models.locate import locate
from jaxformer.models.mup import MuP
from jaxformer.models.stacks import layout, scan
from jaxformer.ops.positions import rotation_until
from jaxformer.params import Tree
from jaxformer.sharding import activation_specs, auto_axes


def spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Every parameter of the model, declared once.

    `source_width` is the width of the encoder, if the model is a decoder.
    """
    trees = {
        "embedding": embedding.spec(config),
        "layers": layout.spec(config, source_width),
        "stack": layout.stack_spec(config),
        "heads": heads.spec(config),
        "shared": layout.shared_spec(config, source_width),
    }
    table = getattr(trees["embedding"].get("tokens"), "shape", None)
    head = heads.language_model(config) if config.tie_embeddings else None
    expected = None if head is None else (config.vocab_size, heads.row_width(config, head))
    if expected is not None and table != expected:
        raise ConfigError(
            f"model.tie_embeddings=True: the head reads by a table `tokens` {expected} of the "
            f"embedding, which has {table}; "
            "set it to False, or give the embedding such a table"
        )
    own = layout.kinds(config, source_width)[0].block.stack_spec or {}
    if both := sorted(own.keys() & trees.keys()):
        raise ConfigError(
            f"model.block: its parameter {both[0]!r} has the name of a part of the model; "
            "give it another name"
        )
    tree = {name: leaves for name, leaves in (trees | own).items() if leaves}
    return config.init_std.spec(tree, config.d_model) if isinstance(config.init_std, MuP) else tree


def check_params(declared: Tree, tree: Tree) -> None:
    """Raises ConfigError for the first parameter that is missing, unknown or misshapen.

    Heads that the config does not have, and prepared layers (a tuple), are allowed.
    """
    if isinstance(tree.get("layers"), tuple):
        declared = {name: leaves for name, leaves in declared.items() if name != "layers"}
        tree = {name: leaves for name, leaves in tree.items() if name != "layers"}
    if problem := params.mismatch(declared, tree, r"(^|/)heads(/|$)"):
        raise ConfigError(f"apply: parameter {problem}; models.init makes those of the config")


def check_inputs(config: ModelConfig, inputs: Inputs) -> None:
    """Raises ConfigError for tokens, images and other inputs that do not fit the config."""
    if inputs.source is not None:
        raise ConfigError("apply: only an encoder-decoder has a `source`")
    B = inputs.tokens.shape[0]
    T = embedding.length(config, inputs.tokens)
    shapes_of_inputs = {
        "positions": [[B, T], [1, T]],
        "segment_ids": [[B, T]],
        "token_types": [[B, T]],
    }
    for name, shapes in shapes_of_inputs.items():
        array = getattr(inputs, name)
        if array is None:
            continue
        is_integer = jnp.issubdtype(array.dtype, jnp.integer)
        if not is_integer or list(array.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ConfigError(
                f"apply: {name} {array.dtype}{list(array.shape)}: expected integers {expected}"
            )
    if inputs.cache is None and inputs.lengths is not None:
        raise ConfigError(
            "apply: `lengths` go with a cache; without one, segment_ids=0 marks padding"
        )
    if inputs.cache is not None and inputs.segment_ids is not None:
        raise ConfigError(
            "apply: a cache keeps one text a row; give `lengths` [B] instead of segment_ids"
        )
    count_from_0 = (
        inputs.positions is None and inputs.segment_ids is None and inputs.lengths is None
    )
    if count_from_0 and config.position_limit < T:
        raise ConfigError(
            f"{T} tokens do not fit the {config.position_limit} learned positions "
            "(model.context_length)"
        )


def output_axes(path: str, leaf) -> tuple[str | None, ...]:
    """The logical axes of a leaf of `Output`."""
    match path.split("/")[0]:
        case "logits" | "heads":
            return ("batch", "length", "vocab") if leaf.ndim == 3 else ("batch",)
        case "hidden" | "source":
            return "batch", "length"
        case "cache" if leaf.ndim > 2:
            return None, "batch"
        case "intermediates" if leaf.ndim > 2:
            return (None, "batch") if "*" in path else ("batch",)
    return ()


# decorates f(...) -> Output, so that it also runs under Explicit mesh axes
in_explicit_axes = auto_axes(activation_specs(output_axes))


def read(
    config: ModelConfig,
    params: Tree,
    output: Output,
    padding_mask=None,
    inputs: Tree = None,
    tokens: Any = None,
) -> Output:
    """The output of `encode`, completed by the outputs of the config's heads.

    The heads read its hidden states, `Inputs.inputs` and `Inputs.tokens`.
    """
    trees = params.get("heads", {})
    outputs = {}
    check_params({"heads": heads.spec(config)}, {"heads": trees})
    for name, head in heads.heads(config, params.get("embedding", {}).get("tokens")).items():
        with jax.named_scope("head"):
            outputs[name] = heads.run(
                head, trees.get(name, {}), output.hidden, padding_mask, inputs, tokens
            )
    return replace(output, logits=next(iter(outputs.values()), None), heads=outputs)


def encode(config: ModelConfig, params: Tree, inputs: Inputs) -> Output:
    """The embedding and the stack: `Output` without heads.

    Raises ConfigError for parameters and inputs that do not fit the config.
    """
    check_inputs(config, inputs)
    source_width = None if inputs.encoded is None else inputs.encoded.hidden.shape[-1]
    declared = spec(config, source_width)
    check_params({name: leaves for name, leaves in declared.items() if name != "heads"}, params)
    context, layer_masks, cache = locate(config, params, inputs)
    embedding_key = layers_key = None
    if inputs.dropout_key is not None:
        embedding_key, layers_key = jax.random.split(inputs.dropout_key)
    with jax.named_scope("embedding"):
        with_key = replace(context, dropout_key=embedding_key)
        of_embedding = params.get("embedding", {})  # it may have no parameters
        x = embedding.embed(config, of_embedding, inputs.tokens, with_key, inputs.inputs)
        x = context.tap("embedding", ops.dropout(x, config.dropout_rate, embedding_key))
    layers = Layers(
        params["layers"],
        layer_masks,
        None if inputs.cache is None else inputs.cache.layers,
        inputs.constants,
        params.get("stack"),
    )
    block = layout.kinds(config, source_width)[0].block
    x = block.begin(of_block(block, params), x, context)
    run_layers = config.stack or scan.stack
    x, of_layers = run_layers(config, layers, x, replace(context, dropout_key=layers_key))
    with jax.named_scope("final_norm"):
        x = block.end(of_block(block, params), x, context)
    if cache is not None:
        x = jnp.where(does_not_fit(config, cache)[:, None, None], jnp.nan, x)
        cache = replace(cache, layers=of_layers.state)
    return Output(
        None,
        x,
        cache,
        context.tap.results(of_layers.intermediates, config.num_layers) or None,
        loss=None if of_layers.loss is None else jnp.mean(of_layers.loss),
        stats=of_layers.stats,
        updates=None if of_layers.updates is None else {"layers": of_layers.updates},
    )


def of_block(block: Block, params: Tree) -> Tree:
    """The parameters of `Block.stack_spec`; {} for a norm without parameters."""
    return {name: params.get(name, {}) for name in block.stack_spec or {}}


def does_not_fit(config: ModelConfig, cache: Any) -> Bool[jax.Array, " B"]:
    """Whether each batch row has more tokens than its cache or its rotations allow."""
    is_too_long = cache.lengths > cache.capacity
    if cache.text_lengths is None:
        return is_too_long
    return is_too_long | (cache.lengths > rotation_until(config.positions, cache.text_lengths))
