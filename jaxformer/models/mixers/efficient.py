"""Named systems as mixers: `ModelConfig(mixer=Performer(features=128), ...)`.

Each is a function `config -> Mixer`, and refuses by name what it cannot do: softcaps, attention maps, dropout on weights that
do not exist, some masks, decoding of what is not causal. Local attention and the Sparse Transformer are masks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, ModelConfig, Relative, require_numbers
from jaxformer.models.layer import Context, Mixer, MixerOutput, linear, linear_maps
from jaxformer.models.mixers.attention import attention, attention_spec
from jaxformer.ops.attention.linear import FeatureMap, visibility
from jaxformer.ops.positions import Bias, Rope, rope
from jaxformer.params import Spec, Tree, random_key


@dataclass(frozen=True)
class Longformer:
    """Sliding window, and global tokens with projections of their own: Beltagy et al. 2020, arXiv:2004.05150. Masks: full().

    The flags `[B, T]` of `apply(..., inputs={"global_tokens": flags})` replace `global_tokens`. Padding yields zeros.
    Numbered global tokens are those of the row, so with them a row of several segments yields NaN.
    """

    window: int = 512  # total width, even
    global_tokens: int | tuple[int, ...] | None = 1  # how many (the first ones), or where; None: each call gives flags
    max_globals: int | None = None  # most global tokens of a row, where flags are traced

    __post_init__ = require_numbers(window=0, global_tokens=0, max_globals=0)

    def __call__(self, config: ModelConfig) -> Mixer:
        spec = attention_spec(config)
        spec |= {f"global_{name}": spec[name] for name in ("query", "key", "value")}

        def mix(params, context, **heads):
            flags = (context.inputs or {}).get("global_tokens")
            tokens = self.global_tokens if flags is None else flags
            if tokens is None:
                raise ValueError('Longformer(global_tokens=None): give inputs={"global_tokens": flags [B, T]} in each call')
            options = _options(config, context) | {"implementation": config.attention_implementation}
            options |= dict(window=self.window, global_tokens=tokens, max_globals=self.max_globals)
            out = _zero_padding(context, ops.longformer_attention(**heads, **options))
            return out if flags is not None or tokens in (0, ()) else _refuse_packed(context, out)

        return _mixer(self, config, mix, spec)


@dataclass(frozen=True)
class BigBird:
    """Global, neighbouring and random blocks: Zaheer et al. 2020, arXiv:2007.14062, ITC. Masks: full().

    `apply(..., constants=layout [L, N, blocks - 2, random])` replaces the layout. Padding of sparse layers yields zeros, and a
    row of several segments NaN: the blocks are those of the row.
    """

    block: int = 64  # tokens of a block
    random: int = 3  # random blocks that a block sees
    # of random blocks. seeded: as published (T a multiple of the block, more than 2 random + 5 blocks); zero: as in Hugging
    # Face's model outside training; random: drawn from `seed` (any T of at least random + 5 blocks)
    layout: Literal["seeded", "zero", "random"] = "seeded"
    seed: int = 0  # of the random layout
    dense_length: int = 0  # up to so many tokens all attend to all (in Hugging Face's model: (5 + 2 random) block)

    __post_init__ = require_numbers(block=1, random=0, seed=0, dense_length=0)

    def __call__(self, config: ModelConfig) -> Mixer:
        def mix(params, context, query, key, value):
            options = _options(config, context) | {"implementation": config.attention_implementation}
            if context.constants is None:
                return ops.attention(query, key, value, **options)
            out = ops.bigbird_attention(query, key, value, context.constants, block=self.block, **options)
            return _refuse_packed(context, _zero_padding(context, out))

        return _mixer(self, config, mix, constants=partial(self._layout, config))

    def _layout(self, config: ModelConfig, T: int) -> Array | None:
        """The random blocks of every layer `[L, N, blocks - 2, random]`; None where attention is dense."""
        if self.dense_length >= T:
            return None
        L, N = config.num_layers, config.num_heads
        plan = (T, self.block, self.random, N)
        match self.layout:
            case "seeded":
                draw = partial(ops.bigbird_layout_seeded, *plan, max_length=config.context_length)
                return jnp.stack([jnp.asarray(draw(layer)) for layer in range(L)])
            case "zero":
                return jnp.asarray(np.stack([ops.bigbird_layout_zero(*plan)] * L))
            case "random":
                return _by_layer(self.seed, L, lambda key: ops.bigbird_layout(key, *plan))


@dataclass(frozen=True)
class Linear:
    """Attention in linear time: Katharopoulos et al. 2020, arXiv:2006.16236. Masks: full() or causal(), which decodes."""

    feature_map: Callable = ops.elu_plus_one  # of queries and keys, token by token
    eps: float = 1e-6  # added to the denominator
    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(eps=0, chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        return _recurrent(self, config, lambda context: (self.feature_map, self.feature_map), self.eps)


@dataclass(frozen=True)
class Efficient:
    """Softmax over features for queries, over the length for keys: Shen et al. 2021, arXiv:1812.01243. full() or causal()."""

    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        mix = lambda params, context, **heads: ops.efficient_attention(**heads, mask=context.mask, chunk=self.chunk)
        return _mixer(self, config, mix, has_weights=False)


@dataclass(frozen=True)
class Performer:
    """FAVOR+: random features of the softmax or ReLU kernel, Choromanski et al. 2021, arXiv:2009.14794.

    Masks: full() or causal(), which decodes. `apply(..., constants=directions [L, features, H])` replaces those drawn from
    `seed`. The stabiliser of keys is 0, the same for a prefix and its continuation: exponents stay below some H / 2.
    """

    features: int = 256  # random directions
    kernel: Literal["softmax", "relu"] = "softmax"  # what the features approximate
    seed: int = 0  # of the directions
    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(features=1, seed=0, chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        draw = lambda key: ops.orthogonal_projection(key, self.features, config.head_size)

        def maps(context):
            if self.kernel == "relu":
                return (partial(ops.favor_relu_features, projection=context.constants),) * 2
            of_query = partial(ops.favor_features, projection=context.constants)
            return of_query, partial(of_query, stabiliser=0.0)

        mixer = _recurrent(self, config, maps, 0.0, self.features)
        return mixer._replace(constants=lambda T: _by_layer(self.seed, config.num_layers, draw))


@dataclass(frozen=True)
class Linformer:
    """Keys and values summed to `rank` rows by trained E and F: Wang et al. 2020, arXiv:2006.04768. Masks: full()."""

    rank: int = 256  # rows of keys and values that remain
    # headwise: E and F of each layer for all its heads; key_value: F = E; layerwise: one E = F for all layers
    sharing: Literal["headwise", "key_value", "layerwise"] = "headwise"

    __post_init__ = require_numbers(rank=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        matrix = Spec((config.context_length, self.rank), ("length", None), normal(self.rank**-0.5), ("length",))
        names = ("key_projection", "value_projection") if self.sharing == "headwise" else ("key_projection",)
        projections = dict.fromkeys(names, matrix)
        in_layer, shared = ({}, projections) if self.sharing == "layerwise" else (projections, None)

        def mix(params, context, **heads):
            matrices = {name: (params if in_layer else context.shared)[name] for name in names}
            return ops.linformer_attention(**heads, **matrices, **_options(config, context))

        return _mixer(self, config, mix, attention_spec(config) | in_layer, shared=shared)


@dataclass(frozen=True)
class Reformer:
    """Queries that are their own keys meet in hash buckets: Kitaev et al. 2020, arXiv:2001.04451. Any mask of one head.

    `apply(..., constants=rotations)` replaces those drawn from `seed`. For reversible residuals see `stacks.reversible`.
    """

    chunk: int = 64  # tokens of a chunk
    rounds: int = 2  # of hashing
    # of one round; None: 2^floor(log2(2 context_length / chunk)), whatever the length of a batch
    buckets: int | tuple[int, ...] | None = None
    chunks_before: int = 1  # chunks before its own that a query sees
    chunks_after: int = 0  # chunks after its own that a query sees
    seed: int = 0  # of the rotations
    redraw: bool = True  # whether training draws the rotations of each step from the dropout key, if there is one
    duplicates: bool = False  # a key met in several rounds counts each time, as in Hugging Face's model
    multiple: int | None = None  # padding fills the length up to a multiple of this; None: of chunk

    def __post_init__(self):
        sizes = dict(chunk=1, rounds=1, buckets=2, chunks_before=0, chunks_after=0, seed=0, multiple=1)
        require_numbers(**sizes)(self)
        if self.multiple is not None and self.multiple % self.chunk:
            raise ConfigError(f"Reformer.multiple={self.multiple}: expected a multiple of chunk={self.chunk}, or None")
        if any(size < 2 or size % 2 for size in np.ravel(self.buckets or 2)):
            raise ConfigError(f"Reformer.buckets={self.buckets}: expected even numbers of at least 2, or None")

    def evaluation(self) -> "Reformer":
        """The same mixer with fixed rotations."""
        return replace(self, redraw=False)

    def __call__(self, config: ModelConfig) -> Mixer:
        N = config.num_heads
        if config.kv_heads != N:
            raise ConfigError(f"model.num_kv_heads={config.kv_heads}: Reformer has a value head for each of {N} heads")
        spec = attention_spec(config)
        del spec["key"]
        buckets = self.buckets or 2 ** max(1, int(math.log2(max(2 * config.context_length / self.chunk, 1))))
        draw = partial(ops.random_rotations, heads=N, head_size=config.head_size, rounds=self.rounds, buckets=buckets)

        def mix(params, context, query, value):
            rotations = context.constants
            if self.redraw and context.dropout_key is not None:
                rotations = draw(random.fold_in(context.dropout_key, 1))
            sizes = {name: getattr(self, name) for name in ("chunk", "chunks_before", "chunks_after", "multiple")}
            options = _options(config, context) | {"duplicates": self.duplicates}
            return ops.lsh_attention(query, value, rotations, **sizes, **options)

        return _mixer(self, config, mix, spec, constants=lambda T: _by_layer(self.seed, config.num_layers, draw))


@dataclass(frozen=True)
class LocalChunks:
    """Softmax attention to the chunks about a query, in a circle: the local layers of Reformer in transformers. Any mask.

    A chunk that a short circle meets twice counts twice. For a causal stack with `before` up to 1, the mask `causal() &
    chunked(chunk, before)` is the same and faster.
    """

    chunk: int = 64  # tokens of a chunk
    before: int = 1  # chunks before its own that a query sees
    after: int = 0  # chunks after its own that a query sees
    multiple: int = 1  # padding fills the length up to a multiple of this

    __post_init__ = require_numbers(chunk=1, before=0, after=0, multiple=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        def attend(params, context, query, key, value, **options):
            chunks = -(-(key.shape[1] + -key.shape[1] % self.multiple) // self.chunk)
            places, counts = np.arange(chunks), np.zeros((chunks, chunks), int)  # how often chunks meet
            for shift in range(-self.before, self.after + 1):
                shift = shift if abs(shift) <= chunks else 0  # as their slices have it
                counts[places, (places + shift) % chunks] += 1
            bias = Bias(_log_meetings, (self.chunk, tuple(map(tuple, counts.tolist()))))
            return ops.attention(query, key, value, **options | {"bias": bias})

        return attention(config, attend=attend)._replace(state=None)


def _log_meetings(bias: Bias, q_positions, kv_positions) -> Array:
    """Score bias log(meetings), and so low a number where there is none that its weight is 0."""
    chunk, counts = bias.args
    table = jnp.asarray(np.log(np.maximum(counts, 1e-30)) + np.where(np.array(counts) == 0, -1e9, 0), jnp.float32)
    return table[q_positions[:, None] // chunk, kv_positions[None, :] // chunk][None]


def _mixer(system, config: ModelConfig, mix: Callable, spec: Tree = None, has_weights: bool = True, **rest: Any) -> Mixer:
    """The frame of all: project x, rotate queries and keys, `mix(params, context, **heads)`, project back."""
    name, spec = type(system).__name__, spec or attention_spec(config)
    biased = isinstance(config.positions, (Alibi, Relative)) or callable(config.positions)
    none = "has none; models.mixers.attention does"
    no_weights = "has no weights to drop; set it to 0 (model.dropout_rate acts on outputs)"
    for field, other, what in (
        ("attention_softcap", config.attention_softcap is not None, none),
        ("attention_scale", config.score_scale is not None, none),
        ("positions", biased, none),
        ("attention_dropout_rate", config.attention_dropout_rate and not has_weights, no_weights),
    ):
        if other:
            raise ConfigError(f"model.{field}={getattr(config, field)}: {name} {what}")

    def apply(params, x, context: Context) -> MixerOutput:
        if context.tap.asks("weights"):
            raise NotImplementedError(f"{name} keeps no attention maps; models.mixers.attention (mixer=None) does")
        maps = {name: params[name] for name in spec if name.endswith(("query", "key", "value"))}
        heads = linear_maps("btd,dnh->btnh", x, maps)
        for projection in heads:
            if isinstance(config.positions, Rope) and not projection.endswith("value"):
                turned = rope(heads[projection], context.positions, config.positions, context.text_lengths)
                heads[projection] = turned
        out = mix(params, context, **heads)
        out, state = out if isinstance(out, tuple) else (out, None)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state)

    return Mixer(spec, apply, **rest)


def _recurrent(system, config: ModelConfig, maps: Callable, eps: float, features: int | None = None) -> Mixer:
    """`linear_attention` with the feature maps `maps(context)`, of (query, key); decoding carries a `LinearState`."""
    name = type(system).__name__

    def mix(params, context, query, key, value):
        of_query, of_key = maps(context)
        options, T = dict(eps=eps, chunk=system.chunk), query.shape[1]
        view = visibility(context.mask, T, T, name)  # also refuses other masks, in the name of this mixer
        if context.state is None:
            return ops.linear_attention(query, key, value, mask=context.mask, feature_map=(of_query, of_key), **options)
        if not view.causal:
            raise NotImplementedError(f"{name} decodes under causal() alone, not {context.mask}")
        real = True if context.real is None else context.real[:, :, None, None]
        masked: FeatureMap = lambda x: jnp.where(real, of_key(x), 0)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        before = jax.tree.map(lambda sums: sums.astype(wide), context.state)
        state, out = ops.linear_attention_step(before, query, key, value, feature_map=(of_query, masked), **options)
        return out, jax.tree.map(lambda sums, old: sums.astype(old.dtype), state, context.state)

    def state(batch: int, length: int, dtype) -> Tree:
        K, H, dtype = config.kv_heads, config.head_size, jnp.promote_types(dtype, jnp.float32)
        M = features or jax.eval_shape(maps(None)[1], jax.ShapeDtypeStruct((1, 1, K, H), dtype)).shape[-1]
        return ops.LinearState(jnp.zeros((batch, K, M, H), dtype), jnp.zeros((batch, K, M), dtype))

    return _mixer(system, config, mix, has_weights=False, state=state)


def _options(config: ModelConfig, context: Context) -> dict[str, Any]:
    return dict(mask=context.mask, dropout_rate=config.attention_dropout_rate, dropout_key=context.dropout_key)


def _zero_padding(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Zeros where a token is padding, also where the mask lets padding see something (heads that pool `position_0`)."""
    return out if context.real is None else jnp.where(context.real[:, :, None, None], out, 0)


def _refuse_packed(context: Context, out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """NaN in a row of several segments: blocks and numbered global tokens belong to the row, not to each of its segments."""
    T = out.shape[1]
    return out if context.real is None else visibility(context.mask, T, T, "").refuse_several(out)


def _by_layer(seed: int, layers: int, draw: Callable) -> Tree:
    """draw(key) for each layer, `[L, ...]`, once while tracing: a step does not draw anew what is always the same."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # the loop forbids transfers while a step is traced
        keys = jax.vmap(partial(random.fold_in, random_key(seed, "seed of a mixer")))(jnp.arange(layers))
        return jax.vmap(draw)(keys)
