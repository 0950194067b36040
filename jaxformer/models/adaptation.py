"""A trained model made into another: low-rank updates, new vocabularies, longer contexts, parts of other checkpoints.

All functions here are pure; what trains is chosen by what is differentiated (`merge`) or by `Experiment.frozen`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal, zeros

from jaxformer import models, params
from jaxformer.config import patterns
from jaxformer.errors import ConfigError
from jaxformer.models.config import EncoderDecoder, Learned, ModelConfig, Patches
from jaxformer.ops.einsum import in_float32
from jaxformer.params import Spec, Tree

TASK_HEADS = r"(^|/)heads/(?!language_model/|pooled/)"  # the heads of a task, which pre-trained weights do not have


def lora(spec: Tree, pattern: str, rank: int) -> dict[str, dict[str, Spec]]:
    """Two factors, `{path: {"a", "b"}}`, for every matrix whose path the regular expression matches somewhere.

    W + scale a b, Hu et al. 2021, arXiv:2106.09685, section 4.1. A kernel of inputs [D] and outputs [N, H] has a [D, rank]
    and b [rank, N, H]; layers and experts have their own. The factor of the inputs starts random, of variance 1 / inputs,
    the other at zero. Train `params.init(lora(...), key)` through `merge`. ConfigError where nothing matches, for what is no
    regular expression, and for a rank below 1; a warning where an alternative, as `a` of `a|b`, matches nothing.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank={rank}: must be at least 1")
    matrices = {path: leaf for path, leaf in params.paths(spec).items() if leaf.contracts}
    factors = {path: _factors(leaf, rank) for path, leaf in matrices.items() if _search(pattern, path)}
    if not factors:
        raise ConfigError(f"lora: no matrix matches {pattern!r}; there are {', '.join(matrices)}")
    patterns.warn_of_idle("lora", pattern, tuple(matrices))
    return factors


def _search(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise ConfigError(f"adaptation: {pattern!r} is no regular expression ({error})") from None


class Adapted(NamedTuple):
    """What trains instead of the parameters of a model."""

    spec: Tree  # of what trains, with the spec of the model at `weights`
    merge: Callable[[Tree], Tree]  # a tree of that spec -> the parameters of the model
    frozen: str | None  # a regular expression over the paths of what does not train
    # a tree of that spec -> the parameters below the adaptation, where all of them are frozen: `training.Base`
    base: Callable[[Tree], Tree] | None = None


@dataclass(frozen=True)
class Lora:
    """Low-rank factors beside frozen weights, `Experiment(adaptation=Lora())`: W + (alpha / rank) a b. See `lora`.

    A task's head is new, so it trains itself beside the factors: every head but the language model's and a bare
    pooler. `trains=None` freezes it, too.
    """

    pattern: str = "(query|value)/kernel$"  # regular expression: matrices whose path it matches somewhere
    rank: int = 8  # width of the factors
    alpha: float = 16.0  # the update is scaled by alpha / rank
    trains: str | None = TASK_HEADS  # regular expression: parameters that train themselves, where their path matches

    def __call__(self, spec: Tree) -> Adapted:
        if not (0 < self.alpha < math.inf):
            raise ConfigError(f"adaptation.alpha={self.alpha}: must be positive and finite")
        trained_paths = [path for path in params.paths(spec) if self.trains is not None and _search(self.trains, path)]
        factors = {path: pair for path, pair in lora(spec, self.pattern, self.rank).items() if path not in trained_paths}
        if not factors:
            problem = f"trains={self.trains!r} matches all matrices of pattern={self.pattern!r}"
            raise ConfigError(f"adaptation: {problem}; make one of them narrower")

        def make(tree):
            return merge(tree["weights"], tree["factors"], self.alpha / self.rank)

        def base(tree):
            return tree["weights"]

        others = "|".join(map(re.escape, trained_paths))
        frozen = f"^weights/(?!({others})$)" if trained_paths else "^weights/"
        return Adapted({"weights": spec, "factors": factors}, make, frozen, None if trained_paths else base)


def _factors(leaf: Spec, rank: int) -> dict[str, Spec]:
    summed = [i for i, axis in enumerate(leaf.axes) if axis in leaf.contracts]
    start, stop = summed[0], summed[-1] + 1
    inputs = normal(math.prod(leaf.shape[start:stop]) ** -0.5), leaf.contracts
    outputs = zeros, ("rank",)
    if stop == len(leaf.axes):  # outputs before inputs, as in a table of tokens: [vocab, embed]
        batch, middle, of_a, of_b = int(leaf.axes[0] == "layers"), start, outputs, inputs
    else:  # the axes before the inputs choose the matrix
        batch, middle, of_a, of_b = start, stop, inputs, outputs
    a = (*leaf.shape[:middle], rank), (*leaf.axes[:middle], "rank")
    b = (*leaf.shape[:batch], rank, *leaf.shape[middle:]), (*leaf.axes[:batch], "rank", *leaf.axes[middle:])
    return {"a": Spec(*a, *of_a), "b": Spec(*b, *of_b)}


def merge(weights: Tree, factors: Tree, scale: float | Array) -> Tree:
    """weights + scale a b, in the weights' shapes and dtypes; `scale` is alpha / rank, and -scale takes the product away.

    Summed in float32, at full precision on every device. Gradients reach both trees. ConfigError for other shapes.
    """

    def merged(path: str, kernel):
        if path not in factors:
            return kernel
        a, b = factors[path]["a"], factors[path]["b"]
        batch = a.ndim + b.ndim - 2 - kernel.ndim
        if a.shape[:-1] + b.shape[batch + 1 :] != kernel.shape or a.shape[-1] != b.shape[batch]:
            raise ConfigError(f"lora: factors {a.shape} and {b.shape} do not make {path} {kernel.shape}")
        lead, rank = a.shape[:batch], a.shape[-1]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        a, b = a.reshape(*lead, -1, rank).astype(wide), b.reshape(*lead, rank, -1).astype(wide)
        return (kernel + scale * jnp.matmul(a, b, precision="highest").reshape(kernel.shape)).astype(kernel.dtype)

    if unknown := sorted(set(factors) - set(params.paths(weights))):
        raise ConfigError(f"lora: the weights have no {', '.join(unknown)}")
    return params.map_with_name(merged, weights)


class Report(NamedTuple):
    """The paths that `transfer` met."""

    taken: list[str]
    missing: list[str]  # in the source
    unused: list[str]  # of the source
    misshapen: list[str]  # of another shape in the source


def transfer(
    target: Tree, source: Tree, *, rename: Mapping[str, str] | None = None, allow: str | None = None
) -> tuple[Tree, Report]:
    """(the target with the source's leaves of the same path and shape, in the target's dtypes, what was done).

    `transfer(models.init(config, key), trained, allow="^heads/")` puts a trained stack under a new head. `rename` maps
    regular expressions to replacements (`re.sub`, in order) of the paths of the source: `{"^": "encoder/"}`. ConfigError if
    a leaf is missing, unused or of another shape, unless the regular expression `allow` matches its (renamed) path.
    """
    found, expected = {}, params.paths(target)
    for path, leaf in params.paths(source).items():
        name = path
        for pattern, replacement in (rename or {}).items():
            name = re.sub(pattern, replacement, name)
        if name in found:
            raise ConfigError(f"transfer: rename gives {path} and another leaf the path {name}; make them differ")
        found[name] = leaf
    both = [path for path in expected if path in found]
    report = Report(
        taken=[path for path in both if found[path].shape == expected[path].shape],
        missing=[path for path in expected if path not in found],
        unused=[path for path in found if path not in expected],
        misshapen=[path for path in both if found[path].shape != expected[path].shape],
    )

    def allowed(path):
        return allow is not None and re.search(allow, path)

    def shown(path):
        return f"{path} {found[path].shape} for {expected[path].shape}" if path in report.misshapen else path

    kinds = {kind: [shown(path) for path in paths if not allowed(path)] for kind, paths in report._asdict().items()}
    if problems := [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names and kind != "taken"]:
        raise ConfigError(f"transfer: {'; '.join(problems)}; rename them, or allow them by a regular expression")

    def take(path, leaf):
        return jnp.asarray(found[path], leaf.dtype) if path in report.taken else leaf

    return params.map_with_name(take, target), report


def resize_vocabulary(
    config: ModelConfig | EncoderDecoder, weights: Tree, vocab_size: int, key: Array, noise: float = 0.01
) -> tuple[Any, Tree]:
    """(config, parameters) of another vocabulary: rows cut off at the end, or new ones, which are the mean of the old.

    So the probabilities of old tokens move little: Hewitt 2021, "Initializing new word embeddings for pretrained language
    models". `noise` times the standard deviation of the old rows tells new rows apart. Of a pair both halves change; where
    they share no table, one may be given by itself: `resize_vocabulary(pair.encoder, weights["encoder"], ...)`.
    """

    def sized(stack):
        return replace(stack, vocab_size=vocab_size)

    pair = isinstance(config, EncoderDecoder)
    new = replace(config, encoder=sized(config.encoder), decoder=sized(config.decoder)) if pair else sized(config)
    specs = params.paths(models.spec(config))

    def resized(path: str, leaf):
        axes = specs[path].axes if path in specs else ()  # a decoder by itself does not know of cross-attention
        if "vocab" not in axes:
            return leaf
        axis = axes.index("vocab")
        old = leaf.shape[axis]
        if vocab_size <= old:
            return jax.lax.slice_in_dim(leaf, 0, vocab_size, axis=axis)
        wide = in_float32(leaf)
        mean, spread = (f(wide, axis=axis, keepdims=True) for f in (jnp.mean, jnp.std))
        shape = (*leaf.shape[:axis], vocab_size - old, *leaf.shape[axis + 1 :])
        new_embeddings = Spec(shape, axes, lambda k, s, d: mean + noise * spread * jax.random.normal(k, s, d))
        drawn = params.init({path: new_embeddings}, key, wide.dtype)[path]  # a key for each path
        return jnp.concatenate([leaf, drawn.astype(leaf.dtype)], axis=axis)

    return new, params.map_with_name(resized, weights)


def extend_positions(config: ModelConfig, weights: Tree, context_length: int) -> tuple[ModelConfig, Tree]:
    """(config, parameters) of another context length, for `Learned` positions: row i is the old row i mod old length.

    As Longformer was made from RoBERTa: Beltagy et al. 2020, section 5. A shorter length keeps the first rows; rows of the
    offset stay. The halves of a pair are given one at a time. ConfigError for positions that are no table of tokens.
    """
    positions: Any = config.positions
    if not isinstance(positions, Learned) or isinstance(config.embedding, Patches):
        others = "for patches use models.vision.resize, for others set model.context_length (and Rope(scaling=...))"
        raise ConfigError(f"extend_positions: the positions are no table of Learned rows for tokens; {others}")
    table, offset = weights["embedding"]["positions"], positions.offset
    new_positions = table[offset:][np.arange(context_length) % config.context_length]
    embedding = weights["embedding"] | {"positions": jnp.concatenate([table[:offset], new_positions])}
    return replace(config, context_length=context_length), weights | {"embedding": embedding}
