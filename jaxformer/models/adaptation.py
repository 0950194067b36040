"""A trained model, changed into another model.

The changes are low-rank updates, new vocabularies, longer contexts, and weights of other
checkpoints. All functions here are pure. What trains is chosen by what you differentiate (`merge`),
or by `Experiment.frozen`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal, zeros

from jaxformer import models, params
from jaxformer.config import patterns
from jaxformer.errors import ConfigError
from jaxformer.models import quantised_base
from jaxformer.models.config import EncoderDecoder, Learned, ModelConfig, Patches
from jaxformer.ops.einsum import in_float32
from jaxformer.params import Spec, Tree

# paths of task heads: pre-trained weights do not have them
TASK_HEADS = r"(^|/)heads/(?!language_model/|pooled/)"


def lora(spec: Tree, pattern: str, rank: int) -> dict[str, dict[str, Spec]]:
    """Two low-rank factors, `{path: {"a", "b"}}`, for every matrix whose path `pattern` matches.

    W + scale a b: Hu et al. 2021, arXiv:2106.09685, section 4.1. `pattern` is a regular expression
    that may match anywhere in the path. A kernel with inputs [D] and outputs [N, H] has a [D, rank]
    and b [rank, N, H]. Each layer and each expert has its own factors. The factor of the inputs
    starts random, with variance 1 / inputs; the other factor starts at zero. Train
    `params.init(lora(...), key)` through `merge`.

    Raises ConfigError if nothing matches, for an invalid regular expression, and for a rank below
    1. Warns if an alternative, such as `a` in `a|b`, matches nothing.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank={rank}: must be at least 1")
    matrices = {path: leaf for path, leaf in params.paths(spec).items() if leaf.contracts}
    factors = {
        path: _factors(leaf, rank) for path, leaf in matrices.items() if _search(pattern, path)
    }
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
    """The tree that trains in place of the parameters of a model."""

    spec: Tree  # of the tree; the spec of the model is at `weights`
    merge: Callable[[Tree], Tree]  # a tree of that spec -> the parameters of the model
    frozen: str | None  # a regular expression over paths: these leaves do not train
    # a tree of that spec -> the frozen parameters below the adaptation; None unless all of them are
    # frozen: see `training.Base`
    base: Callable[[Tree], Tree] | None = None
    # the parameters of the model -> those at `weights`; None: they are the same
    store: Callable[[Tree], Tree] | None = None


@dataclass(frozen=True)
class Lora:
    """Low-rank factors beside frozen weights: W + (alpha / rank) a b, for `Experiment.adaptation`.

    See `lora`. The head of a task is new, so it trains itself, beside the factors. Such heads are
    all except the language model and a bare pooler. `trains=None` freezes these heads too.

    With `stored`, W is what the blocks of that format give back (QLoRA: Dettmers et al. 2023,
    arXiv:2305.14314): NF4 and Int4 take 0.56 bytes a value, Int8 1.06. The merged model has that W,
    and not the weights from which the run began.
    """

    # regular expression: matrices whose path it matches somewhere
    pattern: str = "(query|value)/kernel$"
    rank: int = 8  # width of the factors
    alpha: float = 16.0  # the update is scaled by alpha / rank
    # regular expression: parameters whose path it matches train themselves
    trains: str | None = TASK_HEADS
    # how the state holds frozen matrices: ops.quantised.NF4(), Int4(), Int8(); None: in float32
    stored: Any = None

    def __call__(self, spec: Tree) -> Adapted:
        if not (0 < self.alpha < math.inf):
            raise ConfigError(f"adaptation.alpha={self.alpha}: must be positive and finite")
        trained_paths = []
        if self.trains is not None:
            trained_paths = [path for path in params.paths(spec) if _search(self.trains, path)]
        factors = lora(spec, self.pattern, self.rank)
        factors = {path: pair for path, pair in factors.items() if path not in trained_paths}
        if not factors:
            problem = f"trains={self.trains!r} matches all matrices of pattern={self.pattern!r}"
            raise ConfigError(f"adaptation: {problem}; make one of them narrower")

        base_spec = spec
        read = None
        store = None
        if self.stored is not None:
            matrices = self._matrices(spec, trained_paths)
            base_spec = quantised_base.stored_spec(spec, matrices, self.stored)
            read = partial(quantised_base.read, spec, matrices, self.stored)
            store = partial(quantised_base.store, spec, matrices, self.stored)

        def base(tree):
            return tree["weights"] if read is None else read(tree["weights"])

        def make(tree):
            return merge(base(tree), tree["factors"], self.alpha / self.rank)

        trained_spec = {"weights": base_spec, "factors": factors}
        if not trained_paths:
            return Adapted(trained_spec, make, "^weights/", base, store)
        trained = "|".join(map(re.escape, trained_paths))
        return Adapted(trained_spec, make, f"^weights/(?!({trained})$)", store=store)

    def _matrices(self, spec: Tree, trained_paths: list[str]) -> set[str]:
        """The paths of the matrices that are stored in blocks."""
        if not (hasattr(self.stored, "block") and callable(getattr(self.stored, "levels", None))):
            raise ConfigError(
                f"adaptation.stored={self.stored!r}: no format of blocks; "
                "expected NF4(), Int4(), Int8(), or an object with `block` and `levels()`"
            )
        return quantised_base.stored_paths(spec, trained_paths)


def _factors(leaf: Spec, rank: int) -> dict[str, Spec]:
    """The factors of one matrix: a has its axes up to `middle`, b those from there on."""
    summed = [i for i, axis in enumerate(leaf.axes) if axis in leaf.contracts]
    start, stop = summed[0], summed[-1] + 1
    inputs_first = stop < len(leaf.axes)
    if inputs_first:
        batch = start  # the axes before the inputs choose the matrix
        middle = stop
    else:  # outputs before inputs, as in a table of tokens: [vocab, embed]
        batch = int(leaf.axes[0] == "layers")
        middle = start
    of_inputs = normal(math.prod(leaf.shape[start:stop]) ** -0.5), leaf.contracts
    of_outputs = zeros, ("rank",)
    a = Spec(
        (*leaf.shape[:middle], rank),
        (*leaf.axes[:middle], "rank"),
        *(of_inputs if inputs_first else of_outputs),
    )
    b = Spec(
        (*leaf.shape[:batch], rank, *leaf.shape[middle:]),
        (*leaf.axes[:batch], "rank", *leaf.axes[middle:]),
        *(of_outputs if inputs_first else of_inputs),
    )
    return {"a": a, "b": b}


def merge(weights: Tree, factors: Tree, scale: float | Array) -> Tree:
    """weights + scale a b, in the weights' shapes and dtypes.

    `scale` is alpha / rank; -scale takes the product away again. The sum is in float32, at full
    precision on every device. Gradients reach both trees. Raises ConfigError for other shapes.
    """

    def merged(path: str, kernel):
        if path not in factors:
            return kernel
        a = factors[path]["a"]
        b = factors[path]["b"]
        batch = a.ndim + b.ndim - 2 - kernel.ndim
        if a.shape[:-1] + b.shape[batch + 1 :] != kernel.shape or a.shape[-1] != b.shape[batch]:
            raise ConfigError(
                f"lora: factors {a.shape} and {b.shape} do not make {path} {kernel.shape}"
            )
        batch_shape, rank = a.shape[:batch], a.shape[-1]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        a = a.reshape(*batch_shape, -1, rank).astype(wide)
        b = b.reshape(*batch_shape, rank, -1).astype(wide)
        product = jnp.matmul(a, b, precision="highest").reshape(kernel.shape)
        return (kernel + scale * product).astype(kernel.dtype)

    if unknown := sorted(set(factors) - set(params.paths(weights))):
        raise ConfigError(f"lora: the weights have no {', '.join(unknown)}")
    return params.map_with_name(merged, weights)


class Report(NamedTuple):
    """The paths that `transfer` compared."""

    taken: list[str]
    missing: list[str]  # the source does not have them
    unused: list[str]  # the target does not have them
    misshapen: list[str]  # the source has them in another shape


def transfer(
    target: Tree, source: Tree, *, rename: Mapping[str, str] | None = None, allow: str | None = None
) -> tuple[Tree, Report]:
    """(the target with the source's leaves where path and shape agree, a `Report`).

    Leaves keep the target's dtypes. `transfer(models.init(config, key), trained, allow="^heads/")`
    puts a trained stack under a new head. `rename` maps regular expressions to replacements in the
    paths of the source (`re.sub`, in order): `{"^": "encoder/"}`. Raises ConfigError if a leaf is
    missing, unused or of another shape, unless the regular expression `allow` matches its path
    after renaming.
    """
    offered = _renamed(source, rename or {})
    expected = params.paths(target)
    both = [path for path in expected if path in offered]
    report = Report(
        taken=[path for path in both if offered[path].shape == expected[path].shape],
        missing=[path for path in expected if path not in offered],
        unused=[path for path in offered if path not in expected],
        misshapen=[path for path in both if offered[path].shape != expected[path].shape],
    )

    def shown(path):
        if path not in report.misshapen:
            return path
        return f"{path} {offered[path].shape} for {expected[path].shape}"

    problems = []
    for kind in ("missing", "unused", "misshapen"):
        paths = getattr(report, kind)
        refused = [path for path in paths if allow is None or not re.search(allow, path)]
        if refused:
            problems.append(f"{kind}: {', '.join(map(shown, refused))}")
    if problems:
        raise ConfigError(
            f"transfer: {'; '.join(problems)}; rename them, or allow them by a regular expression"
        )

    def take(path, leaf):
        return jnp.asarray(offered[path], leaf.dtype) if path in report.taken else leaf

    return params.map_with_name(take, target), report


def _renamed(source: Tree, rename: Mapping[str, str]) -> dict[str, Any]:
    """{path after renaming: leaf}. Raises ConfigError for two leaves of one path."""
    leaves = {}
    for path, leaf in params.paths(source).items():
        name = path
        for pattern, replacement in rename.items():
            name = re.sub(pattern, replacement, name)
        if name in leaves:
            raise ConfigError(
                f"transfer: rename gives {path} and another leaf the path {name}; make them differ"
            )
        leaves[name] = leaf
    return leaves


def resize_vocabulary(
    config: ModelConfig | EncoderDecoder,
    weights: Tree,
    vocab_size: int,
    key: Array,
    noise: float = 0.01,
) -> tuple[Any, Tree]:
    """(config, parameters) with another vocabulary size: rows at the end are cut off or added.

    An added row is the mean of the old rows, so the probabilities of old tokens move little: Hewitt
    2021, "Initializing new word embeddings for pretrained language models". `noise` times the
    standard deviation of the old rows makes the added rows differ. Both halves of an
    encoder-decoder change. If they share no table, one half may be passed alone:
    `resize_vocabulary(pair.encoder, weights["encoder"], ...)`.
    """

    def sized(stack):
        return replace(stack, vocab_size=vocab_size)

    if isinstance(config, EncoderDecoder):
        new = replace(config, encoder=sized(config.encoder), decoder=sized(config.decoder))
    else:
        new = sized(config)
    specs = params.paths(models.spec(config))

    def resized(path: str, leaf):
        # the spec of a decoder alone has no cross-attention
        axes = specs[path].axes if path in specs else ()
        if "vocab" not in axes:
            return leaf
        axis = axes.index("vocab")
        old = leaf.shape[axis]
        if vocab_size <= old:
            return jax.lax.slice_in_dim(leaf, 0, vocab_size, axis=axis)
        wide = in_float32(leaf)
        mean = jnp.mean(wide, axis=axis, keepdims=True)
        spread = jnp.std(wide, axis=axis, keepdims=True)
        shape = (*leaf.shape[:axis], vocab_size - old, *leaf.shape[axis + 1 :])
        new_embeddings = Spec(
            shape, axes, lambda k, s, d: mean + noise * spread * jax.random.normal(k, s, d)
        )
        drawn = params.init({path: new_embeddings}, key, wide.dtype)[path]  # a key for each path
        return jnp.concatenate([leaf, drawn.astype(leaf.dtype)], axis=axis)

    return new, params.map_with_name(resized, weights)


def extend_positions(
    config: ModelConfig, weights: Tree, context_length: int
) -> tuple[ModelConfig, Tree]:
    """(config, parameters) with another context length, for `Learned` positions.

    New row i is the old row i mod the old length, as Longformer was made from RoBERTa: Beltagy et
    al. 2020, section 5. A shorter length keeps the first rows. Rows of the offset stay. Pass the
    halves of an encoder-decoder one at a time. Raises ConfigError for positions without a table for
    tokens.
    """
    positions: Any = config.positions
    if not isinstance(positions, Learned) or isinstance(config.embedding, Patches):
        others = (
            "for patches use models.vision.resize, "
            "for others set model.context_length (and Rope(scaling=...))"
        )
        raise ConfigError(
            f"extend_positions: the positions are no table of Learned rows for tokens; {others}"
        )
    table = weights["embedding"]["positions"]
    offset = positions.offset
    new_positions = table[offset:][np.arange(context_length) % config.context_length]
    embedding = weights["embedding"] | {
        "positions": jnp.concatenate([table[:offset], new_positions])
    }
    return replace(config, context_length=context_length), weights | {"embedding": embedding}
