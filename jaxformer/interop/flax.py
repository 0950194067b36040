"""Our models as Flax modules, Linen's or NNX's, and Flax's layers as parts of our models.

Outwards: `as_linen(config)`, `as_nnx(config, params)` and `params_of(model)`, which keep the paths of the parameters, so
that checkpoints, decay masks and shardings fit both sides. Inwards: `FlaxMixer(module)` and `FlaxFeedForward(module)`.

Nobody who needs no Flax layers waits for them (Linen takes a second to import, NNX two): functions import what they use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, random

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.masks import rules
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.models.config import Learned, Sinusoidal
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, Mixer, MixerOutput
from jaxformer.params import Spec

Tree = Any

# Outwards


def as_linen(config: ModelConfig | EncoderDecoder, param_dtype=jnp.float32, partitioned: bool = False) -> Any:
    """A `linen.Module` that is the model: `module.apply({"params": p}, tokens, **options)` is `models.apply`'s Output.

    `module.init(key, tokens, **options)["params"]` is `models.init(config, key, param_dtype)`, and `rngs={"dropout": key}`
    is `dropout_key=key` (without it nothing is dropped): both keys as they are, in a module of its own. As part of another
    module the keys are folded with its path, and from a second call of one instance on with the number of the call,
    as Linen does. `partitioned` boxes each parameter with the names of its axes, for `linen.logical_axis_rules`.
    """
    return _linen_class()(config, param_dtype, partitioned)


@cache  # one class, so that equal models are equal modules and jit compiles them once
def _linen_class():
    from flax import linen

    class Transformer(linen.Module):
        config: Any
        param_dtype: Any = jnp.float32
        partitioned: bool = False

        @linen.compact
        def __call__(self, tokens, **options):
            scope: Any = self.scope

            def draw(key, name, tree):
                # Linen's key for a parameter has counted those before it; ours knows the path, which is enough
                key = scope.rngs["params"].as_jax_rng() if self.has_rng("params") else key
                values = params.init({name: tree}, key, self.param_dtype)[name]
                box = lambda value, leaf: linen.LogicallyPartitioned(value, leaf.axes)
                return jax.tree.map(box, values, tree) if self.partitioned else values

            tree = {name: self.param(name, draw, name, part) for name, part in models.spec(self.config).items()}
            if "dropout_key" not in options and self.has_rng("dropout"):
                counted = self.make_rng("dropout")
                first = scope.rng_counters["dropout"] == 1
                options["dropout_key"] = scope.rngs["dropout"].as_jax_rng() if first else counted
            return models.apply(self.config, tree, tokens, **options)

    return Transformer


def as_nnx(config: ModelConfig | EncoderDecoder, params: Tree) -> Any:
    """An `nnx.Module` with these parameters: `model(tokens, **options)` is `models.apply(config, params, tokens, **options)`.

    `model.layers.attention.query.kernel` is an `nnx.Param`, the others likewise by their paths. The model reads them when
    it is called, so each may be replaced: by another Variable, or by a module that makes the array when it is called
    without arguments, of Variables of its own (LoRA: a kernel plus a product of two `nnx.LoRAParam`). Dropout acts where
    `dropout_key=` is given (`rngs.dropout()`). Raises ConfigError for parameters that are not the config's.
    """
    _check(config, params)
    return _nnx_class()(config, params)


@cache
def _nnx_class():
    from flax import nnx

    def boxed(node):
        if isinstance(node, Mapping):
            return nnx.Dict({name: boxed(part) for name, part in node.items()})
        return nnx.Param(node)

    class Transformer(nnx.Module):
        def __init__(self, config, params):
            self.config = config
            self.names = tuple(params)  # what else a user hangs on the model is no parameter of ours
            for name, part in params.items():
                setattr(self, name, boxed(part))

        def __call__(self, tokens, **options):
            return models.apply(self.config, params_of(self), tokens, **options)

    return Transformer


def params_of(model: Any) -> Tree:
    """The parameters of a model of `as_nnx` as our plain tree: modules in the place of one give what they make of theirs."""
    from flax import nnx

    def plain(node):
        if isinstance(node, nnx.Variable):
            return node.get_value()
        if isinstance(node, nnx.Dict):
            return {name: plain(node[name]) for name in node}
        return plain(node()) if callable(node) else node

    if not isinstance(model, _nnx_class()):
        raise ConfigError(f"params_of: expected a model of as_nnx, got {type(model).__name__}")
    return {name: plain(getattr(model, name)) for name in model.names}


def _check(config, tree) -> None:
    """ConfigError where the tree is not that of the config."""
    want = {path: leaf.shape for path, leaf in params.paths(models.spec(config)).items()}
    have = {path: getattr(leaf, "shape", None) for path, leaf in params.paths(tree).items()}
    for path in sorted(want | have):
        if want.get(path) != have.get(path):
            told = [
                "none" if path not in side else f"one of shape {side[path]}" if side[path] is not None else "no array"
                for side in (want, have)
            ]
            raise ConfigError(
                f"as_nnx: parameter {path}: the config has {told[0]}, the given tree {told[1]}; models.init makes "
                "the config's"
            )


# Inwards


def plain(module, x, context: Context):
    """How a layer is called unless told otherwise."""
    return module(x)


@dataclass(frozen=True)
class FlaxFeedForward:
    """A Flax layer `[B, T, D] -> [B, T, D]` as a feed-forward: `ModelConfig(feedforward=FlaxFeedForward(my_mlp))`.

    `module` is a Linen module, or of NNX a function `rngs -> nnx.Module`. Each parameter of each layer starts as the
    module's own initialiser has it, with a key of its own. `call(module, x, context) -> out` says how the layer is called:
    a Linen layer with dropout wants `deterministic=context.dropout_key is None`; an NNX module is in train mode just where
    there is a dropout key, and draws from that. The output comes back in x's dtype; what the layer computes in is its
    own `dtype`. An experiment file names a function, `def mlp(config): return FlaxFeedForward(...)(config)`, since a config
    that holds a Flax module has no text form. Raises ConfigError for state beside parameters (batch norm), and for another
    output shape.
    """

    module: Callable
    call: Callable = plain

    def __call__(self, config: ModelConfig) -> FeedForward:
        def fed(run):
            return lambda params, x, context: FeedForwardOutput(run(params, x, context))

        return FeedForward(*_guest("model.feedforward", self, config, fed))


@dataclass(frozen=True)
class FlaxMixer:
    """A Flax layer `[B, T, D] -> [B, T, D]` as a mixer: `ModelConfig(mixer=FlaxMixer(layer, call))`. See `FlaxFeedForward`.

    Attention needs `call`, because a layer that is called as `module(x)` sees no mask (and is refused any but full()):
    `lambda module, x, context: module(x, mask=context.mask.dense(x.shape[1], x.shape[1]))`. It cannot decode, keeps no
    attention maps, and knows of positions what the embedding says; fields that are attention's own are refused.
    """

    module: Callable
    call: Callable = plain

    def __call__(self, config: ModelConfig) -> Mixer:
        positions = config.positions
        for field, other in (
            ("attention_softcap", config.attention_softcap is not None),
            ("attention_scale", config.attention_scale is not None),
            ("attention_dropout_rate", config.attention_dropout_rate != 0),
            ("positions", positions is not None and not isinstance(positions, Learned | Sinusoidal)),
        ):
            if other:
                raise ConfigError(
                    f"model.{field}={getattr(config, field)}: a FlaxMixer does not read it; build it into the layer, or "
                    "use models.mixers.attention (mixer=None)"
                )

        def mixed(run):
            def apply(params, x, context: Context) -> MixerOutput:
                if context.return_weights:
                    raise NotImplementedError(
                        "FlaxMixer keeps no attention maps; models.mixers.attention (mixer=None) does"
                    )
                if self.call is plain and context.mask.rule is not rules.full:
                    raise ConfigError(
                        f"model.mixer: {_name(self.module)} is called as module(x), which does not see the mask "
                        f"{context.mask}; give FlaxMixer a `call` that does (or is right without it), or set "
                        "model.masks to (full(),)"
                    )
                return MixerOutput(run(params, x, context))

            return apply

        def no_state(*_):
            raise NotImplementedError("FlaxMixer cannot decode; models.mixers.attention (mixer=None) can")

        return Mixer(*_guest("model.mixer", self, config, mixed), no_state)


def _name(module) -> str:
    return getattr(module, "__name__", type(module).__name__)


def _guest(
    where: str, guest: FlaxFeedForward | FlaxMixer, config: ModelConfig, wrap: Callable
) -> tuple[Tree, Callable]:
    """(spec, wrap(run)), where run(params, x, context) -> out calls the guest's module; it has been tried on shapes."""
    from flax import linen

    T = config.embedding.length if isinstance(config.embedding, Patches) else config.context_length

    mask = next(
        (mask for mask in config.masks if mask.rule is rules.full), config.masks[0]
    )  # one that this layer may see

    def example():  # what parameters may depend on: the config's length (as a map over positions does) and width
        return jnp.zeros((1, T, config.d_model)), Context(mask, jnp.arange(T)[None])

    known = _linen_guest if isinstance(guest.module, linen.Module) else _nnx_guest
    spec, run = known(where, guest.module, guest.call, example)

    def out(params, x, context):
        return run(params, x, context).astype(x.dtype)

    apply = wrap(out)
    shapes = jax.eval_shape(lambda params: apply(params, *example())[0], params.abstract(spec))
    if shapes.shape != (1, T, config.d_model):
        raise ConfigError(
            f"{where}: {_name(guest.module)} makes {shapes.shape} of x {(1, T, config.d_model)}; expected the same shape"
        )
    return spec, apply


def _linen_guest(where: str, module, call: Callable, example: Callable) -> tuple[Tree, Callable]:
    from flax import linen

    boxed = lambda leaf: isinstance(leaf, linen.Partitioned)

    def start(key: Array) -> Tree:
        x, context = example()
        return module.init({"params": key, "dropout": key}, x, method=lambda m, x: call(m, x, context))

    @jax.jit  # parameters alone are asked for: XLA does not run the layer
    def draw(key: Array) -> list[Array]:
        leaves = jax.tree.leaves(start(key)["params"], is_leaf=boxed)
        return [leaf.value if boxed(leaf) else leaf for leaf in leaves]

    variables = jax.eval_shape(start, random.key(0))
    if beside := sorted(set(variables) - {"params"}):
        raise ConfigError(_stateful(where, module, beside))
    leaves, structure = jax.tree.flatten(variables.get("params", {}), is_leaf=boxed)
    specs = [
        _leaf(draw, i, leaf.value.shape, leaf.names) if boxed(leaf) else _leaf(draw, i, leaf.shape)
        for i, leaf in enumerate(leaves)
    ]

    def run(params, x, context: Context):
        rngs = {} if context.dropout_key is None else {"dropout": context.dropout_key}
        return module.apply({"params": params}, x, rngs=rngs, method=lambda m, x: call(m, x, context))

    return jax.tree.unflatten(structure, specs), run


def _nnx_guest(where: str, make: Callable, call: Callable, example: Callable) -> tuple[Tree, Callable]:
    from flax import nnx

    if isinstance(make, nnx.Module):
        raise ConfigError(
            f"{where}: {_name(make)} has its values already, and each layer draws its own: give the function that makes "
            "it, lambda rngs: ..."
        )

    def start(key: Array):
        with nnx.use_eager_sharding(False):  # axes that parameters name are ours, of no mesh yet
            module = make(nnx.Rngs(key)) if callable(make) else make
            if not isinstance(module, nnx.Module):
                raise ConfigError(
                    f"{where}: expected a linen.Module or a function rngs -> nnx.Module, got {_name(make)} (which makes "
                    f"{type(module).__name__})"
                )
            return nnx.split(module, nnx.Param, nnx.RngState, ...)

    @jax.jit
    def draw(key: Array) -> list[Array]:
        return [variable.get_value() for _, variable in nnx.to_flat_state(start(key)[1])]

    graph, weights, streams, rest = jax.eval_shape(start, random.key(0))
    if rest:
        raise ConfigError(_stateful(where, make, sorted({type(v).__name__ for _, v in nnx.to_flat_state(rest)})))
    weights, streams = list(nnx.to_flat_state(weights)), list(nnx.to_flat_state(streams))
    names = [tuple(map(str, path)) for path, _ in weights]
    specs = [_leaf(draw, i, leaf.shape, leaf.get_metadata("out_sharding", None)) for i, (_, leaf) in enumerate(weights)]

    def run(params, x, context: Context):
        key = random.key(0) if context.dropout_key is None else context.dropout_key
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = random.wrap_key_data(key)

        def fresh(i, leaf):  # each stream draws its own
            if isinstance(leaf, nnx.RngKey):
                return random.split(random.fold_in(key, i), leaf.shape)
            return jnp.zeros(leaf.shape, leaf.dtype)

        values = flatten_dict(params)
        with nnx.use_eager_sharding(False):
            own = [(path, leaf.copy(values[name])) for name, (path, leaf) in zip(names, weights, strict=True)]
            drawn = [(path, leaf.copy(fresh(i, leaf))) for i, (path, leaf) in enumerate(streams)]
            module = nnx.merge(graph, nnx.from_flat_state(own), nnx.from_flat_state(drawn))
        module.eval() if context.dropout_key is None else module.train()
        return call(module, x, context)

    return unflatten_dict(dict(zip(names, specs, strict=True))), run


def _leaf(draw: Callable, i: int, shape: tuple[int, ...], names=None) -> Spec:
    """The i-th parameter of those that draw(key) makes."""
    axes = (None,) * len(shape) if names is None else tuple(names)
    return Spec(shape, axes, lambda key, shape, dtype: draw(key)[i].astype(dtype))


def _stateful(where: str, module, beside: list[str]) -> str:
    return (
        f"{where}: {_name(module)} keeps {', '.join(beside)} beside its parameters; a layer here has no state of its own: "
        "use one without (layer norm for batch norm)"
    )
