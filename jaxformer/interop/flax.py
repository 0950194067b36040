"""Our models as Flax modules (Linen or NNX), and Flax layers as parts of our models.

`as_linen` and `as_nnx` keep the paths of our parameters. `FlaxFeedForward` and `FlaxMixer` put a
Flax layer into a `ModelConfig`; `FlaxModel` makes a whole Flax model the model of an experiment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, random

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.masks import full, rules
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.models.config import Axial, Learned, Sinusoidal
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, Mixer, MixerOutput
from jaxformer.params import Spec, Tree, mismatch


class Transformer(linen.Module):
    """`as_linen(config)`: `module.apply({"params": p}, tokens, **options)` is `models.apply`.

    `module.init` is `models.init`. `rngs={"dropout": key}` means `dropout_key=key`; without it
    there is no dropout. Inside another module Linen changes these keys by path and call.
    `jaxformer.sharding` splits the parameters over a mesh.
    """

    config: Any
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, tokens, **options):
        spec = models.spec(self.config)
        tree = {
            name: self.param(name, partial(_draw, self, name), subtree)
            for name, subtree in spec.items()
        }
        if "dropout_key" not in options and self.has_rng("dropout"):
            linen_key = self.make_rng("dropout")
            scope = cast(Any, self.scope)
            # the first key is the user's own; later keys are those that Linen makes
            is_first = scope.rng_counters["dropout"] == 1
            options["dropout_key"] = scope.rngs["dropout"].as_jax_rng() if is_first else linen_key
        return models.apply(self.config, tree, tokens, **options)


def _draw(module: Any, name: str, key: Array, spec: Tree) -> Tree:
    # `self.param` would fold the number of earlier parameters into the key. Our keys already depend
    # on the path.
    key = module.scope.rngs["params"].as_jax_rng() if module.has_rng("params") else key
    return params.init({name: spec}, key, module.param_dtype)[name]


class NNXTransformer(nnx.Module):
    """`as_nnx(config, params)`: `model(tokens, **options)` is `models.apply(config, params, ...)`.

    Each parameter is an `nnx.Param` at its path, such as `model.layers.attention.query.kernel`.
    Another Variable may replace it, or a module that returns the array when it is called (LoRA).
    Raises ConfigError if `params` do not match `config`.
    """

    def __init__(self, config: ModelConfig | EncoderDecoder, params: Tree):
        if wrong := mismatch(models.spec(config), params):
            raise ConfigError(
                f"as_nnx: the parameters are not those of the config: {wrong}; "
                "models.init makes them"
            )
        self.config = config
        self.names = tuple(params)  # users may set other attributes
        for name, subtree in params.items():
            setattr(self, name, _boxed(subtree))

    def __call__(self, tokens, **options):
        return models.apply(self.config, params_of(self), tokens, **options)


as_linen: Any = Transformer
as_nnx: Any = NNXTransformer


def _boxed(node: Any) -> Any:
    """A tree of arrays as a tree of `nnx.Param`."""
    if isinstance(node, Mapping):
        return nnx.Dict({name: _boxed(child) for name, child in node.items()})
    return nnx.Param(node)


def params_of(model: Any) -> Tree:
    """The parameters of an `as_nnx` model as a plain tree.

    A module that replaces a parameter is called, and its result is the parameter.
    """
    return {name: _plain(getattr(model, name)) for name in model.names}


def _plain(node: Any) -> Any:
    if isinstance(node, nnx.Variable):
        return node.get_value()
    if isinstance(node, nnx.Dict):
        return {name: _plain(node[name]) for name in node}
    return _plain(node()) if callable(node) else node


def call_with_x(module, x, context: Context):
    """The default `call`: the layer sees only x."""
    return module(x)


@dataclass(frozen=True)
class FlaxFeedForward:
    """A Flax layer `[B, T, D] -> [B, T, D]` as a feed-forward.

    `ModelConfig(feedforward=FlaxFeedForward(my_mlp))` uses it. `module` is a Linen module, or for
    NNX a function `rngs -> nnx.Module`. `call(module, x, context) -> out` calls it. A Linen layer
    with dropout needs `deterministic=context.dropout_key is None`; an NNX module is in training
    mode if there is a dropout key. Raises ConfigError for state besides parameters (batch norm) and
    for another output shape.
    """

    module: Callable
    call: Callable = call_with_x

    def __call__(self, config: ModelConfig) -> FeedForward:
        def wrap(run, *arguments):
            return FeedForwardOutput(run(*arguments))

        return FeedForward(*_part("model.feedforward", self, config, wrap))


@dataclass(frozen=True)
class FlaxMixer:
    """A Flax layer as a mixer: `ModelConfig(mixer=FlaxMixer(layer, call))`. See `FlaxFeedForward`.

    The default `call` passes no mask, so it accepts only full(). Attention needs a `call` that
    passes the mask:

        lambda module, x, context: module(x, mask=context.mask.dense(x.shape[1], x.shape[1]))

    Such a mixer cannot decode, has no attention maps, and sees positions only in the embedding.
    Raises ConfigError for config fields that only our attention reads.
    """

    module: Callable
    call: Callable = call_with_x

    def __call__(self, config: ModelConfig) -> Mixer:
        attention_fields = {
            "attention_softcap": config.attention_softcap is not None,
            "attention_scale": config.score_scale is not None,
            "attention_dropout_rate": config.attention_dropout_rate != 0,
            "positions": not isinstance(config.positions, Learned | Sinusoidal | Axial | None),
        }
        for field, is_set in attention_fields.items():
            if is_set:
                advice = "build it into the layer, or use models.mixers.attention (mixer=None)"
                raise ConfigError(
                    f"model.{field}={getattr(config, field)}: a FlaxMixer does not read it; "
                    f"{advice}"
                )
        return Mixer(*_part("model.mixer", self, config, partial(_mix, self)))


@dataclass(frozen=True)
class FlaxModel:
    """A whole Flax model, tokens `[B, T]` -> logits `[B, T, V]`, as `Experiment.model`.

    `FlaxFeedForward` explains `module` and `call`. The model computes in its own dtypes:
    `Experiment.precision` does not reach it. An evaluation passes no dropout key.
    """

    module: Callable
    context_length: int  # T of an example
    vocab_size: int  # V
    call: Callable = call_with_x
    trains: bool = True  # whether `call` receives the dropout key

    def spec(self) -> Tree:
        return self._build()[0]

    def apply(
        self, params: Tree, tokens: Array, dropout_key: Array | None = None, dtype=None
    ) -> models.Output:
        context = _context(tokens, dropout_key if self.trains else None)
        return models.Output(self._build()[1](params, tokens, context), None)

    def evaluation(self) -> "FlaxModel":
        return replace(self, trains=False)

    def _build(self) -> tuple[Tree, Callable]:
        tokens = jnp.zeros((1, self.context_length), jnp.int32)
        return _layer("model", self, lambda: (tokens, _context(tokens, None)))


def _context(tokens: Array, dropout_key: Array | None) -> Context:
    return Context(full(), jnp.arange(tokens.shape[1])[None], dropout_key=dropout_key)


def _mix(mixer: FlaxMixer, run: Callable, params, x, context: Context) -> MixerOutput:
    if context.tap.asks("weights"):
        raise NotImplementedError(
            "FlaxMixer keeps no attention maps; models.mixers.attention (mixer=None) does"
        )
    if mixer.call is call_with_x and context.mask.rule is not rules.full:
        problem = (
            f"model.mixer: {_name(mixer.module)} is called as module(x), "
            f"which does not see the mask {context.mask}"
        )
        raise ConfigError(
            f"{problem}; give FlaxMixer a `call` that passes it (or needs none), "
            "or set model.masks to (full(),)"
        )
    return MixerOutput(run(params, x, context))


def _name(module) -> str:
    return getattr(module, "__name__", type(module).__name__)


def _part(
    where: str, layer: FlaxFeedForward | FlaxMixer, config: ModelConfig, wrap: Callable
) -> tuple[Tree, Callable]:
    """(spec, apply) of a part of our models that is made of a Flax layer.

    `apply(params, x, context)` is `wrap(run, params, x, context)`, where `run` calls the layer.
    Raises ConfigError if the output has another shape than x.
    """
    T = config.embedding.length if isinstance(config.embedding, Patches) else config.context_length
    # every layer accepts full(), so its shapes are found with this mask if the model has it
    mask = next((mask for mask in config.masks if mask.rule is rules.full), config.masks[0])

    def example():
        # the shapes of parameters may depend on T and D
        return (jnp.zeros((1, T, config.d_model)), Context(mask, jnp.arange(T)[None]))

    spec, run = _layer(where, layer, example)
    apply = partial(wrap, lambda params, x, context: run(params, x, context).astype(x.dtype))
    out = jax.eval_shape(lambda params: apply(params, *example())[0], params.abstract(spec)).shape
    expected = (1, T, config.d_model)
    if out != expected:
        raise ConfigError(
            f"{where}: {_name(layer.module)} makes {out} of x {expected}; expected the same shape"
        )
    return spec, apply


def _layer(where: str, layer: Any, example: Callable) -> tuple[Tree, Callable]:
    """(spec, run) of a Flax layer that is called with example() = (x, context)."""
    build = _linen_layer if isinstance(layer.module, linen.Module) else _nnx_layer
    return build(where, layer.module, layer.call, example)


def _linen_layer(where: str, module, call: Callable, example: Callable) -> tuple[Tree, Callable]:
    def boxed(leaf):
        return isinstance(leaf, linen.Partitioned)

    def unboxed(leaf):
        return leaf.value if boxed(leaf) else leaf

    def start(key: Array) -> Tree:
        x, context = example()
        return module.init(
            {"params": key, "dropout": key}, x, method=lambda m, x: call(m, x, context)
        )

    @jax.jit  # only parameters are returned, so XLA does not run the layer
    def draw(key: Array) -> list[Array]:
        return [unboxed(leaf) for leaf in jax.tree.leaves(start(key)["params"], is_leaf=boxed)]

    def run(params, x, context: Context):
        rngs = {} if context.dropout_key is None else {"dropout": context.dropout_key}
        return module.apply(
            {"params": params}, x, rngs=rngs, method=lambda m, x: call(m, x, context)
        )

    variables = jax.eval_shape(start, random.key(0))
    _refuse_state(where, module, set(variables) - {"params"})
    leaves, structure = jax.tree.flatten(variables.get("params", {}), is_leaf=boxed)
    specs = [
        _leaf(draw, i, unboxed(leaf).shape, getattr(leaf, "names", None))
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, specs), run


def _nnx_layer(
    where: str, make: Callable, call: Callable, example: Callable
) -> tuple[Tree, Callable]:
    if isinstance(make, nnx.Module):
        raise ConfigError(
            f"{where}: {_name(make)} has its values already; "
            "give the function that makes it, lambda rngs: ..."
        )

    def start(key: Array):
        with nnx.use_eager_sharding(False):  # the axes of its parameters belong to no mesh yet
            return nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)

    @jax.jit
    def draw(key: Array) -> list[Array]:
        return [variable.get_value() for _, variable in nnx.to_flat_state(start(key)[1])]

    graph, weights, streams, rest = jax.eval_shape(start, random.key(0))
    _refuse_state(where, make, {type(v).__name__ for _, v in nnx.to_flat_state(rest)})
    weights = list(nnx.to_flat_state(weights))
    streams = list(nnx.to_flat_state(streams))
    names = [tuple(map(str, path)) for path, _ in weights]
    specs = [
        _leaf(draw, i, leaf.shape, leaf.get_metadata("out_sharding", None))
        for i, (_, leaf) in enumerate(weights)
    ]

    def run(params, x, context: Context):
        key = random.key(0) if context.dropout_key is None else context.dropout_key
        values = flatten_dict(params)
        with nnx.use_eager_sharding(False):
            filled = [
                (path, leaf.copy(values[name]))
                for name, (path, leaf) in zip(names, weights, strict=True)
            ]
            keys = [
                (path, leaf.copy(_stream(key, i, leaf))) for i, (path, leaf) in enumerate(streams)
            ]
            module = nnx.merge(graph, nnx.from_flat_state(filled), nnx.from_flat_state(keys))
        module.eval() if context.dropout_key is None else module.train()
        return call(module, x, context)

    return unflatten_dict(dict(zip(names, specs, strict=True))), run


def _stream(key: Array, i: int, leaf: Any) -> Array:
    """The initial value of the i-th random state of an NNX module: keys, or a count of zero."""
    if not isinstance(leaf, nnx.RngKey):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = random.wrap_key_data(key)
    return random.split(random.fold_in(key, i), leaf.shape)


def _leaf(draw: Callable, i: int, shape: tuple[int, ...], names) -> Spec:
    axes = (None,) * len(shape) if names is None else tuple(names)
    return Spec(shape, axes, lambda key, shape, dtype: draw(key)[i].astype(dtype))


def _refuse_state(where: str, module: Any, kinds: set[str]) -> None:
    if kinds:
        advice = "a layer here has no state: use one without (layer norm for batch norm)"
        raise ConfigError(
            f"{where}: {_name(module)} keeps {', '.join(sorted(kinds))} besides parameters; "
            f"{advice}"
        )
