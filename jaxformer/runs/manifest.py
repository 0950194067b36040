"""The manifest of a checkpoint: path, shape, dtype and fingerprint of each leaf.

`seal` writes it, `unseal` reads it, `compare` holds it against a model.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax import Array, lax

from jaxformer.config import to_json
from jaxformer.errors import ConfigError
from jaxformer.parallel.mesh import block_if_simulated
from jaxformer.params import Tree


class CheckpointError(ConfigError):
    """No checkpoint fits or is good, or a save that had to succeed failed."""


class Damaged(Exception):
    """The files of one step are bad; the message names the leaf or the file."""


def seal(
    step: int,
    metric: float | None,
    metadata: dict | None,
    leaves: dict[str, jax.Array],
    score: str | None = None,
) -> dict[str, str]:
    """The manifest as JSON, with its checksum.

    `score` names what `metric` measures. Raises TypeError if `metadata` is not JSON.
    """
    described = {}
    for (name, leaf), digits in zip(leaves.items(), fingerprints(leaves.values()), strict=True):
        described[name] = {"shape": leaf.shape, "dtype": str(leaf.dtype), "fingerprint": digits}
        if is_key(leaf):
            described[name]["key"] = str(jax.random.key_impl(leaf))
    contents = {
        "step": int(step),
        "metric": metric,
        "score": score,
        "metadata": metadata or {},
        "leaves": described,
    }
    return _with_checksum(to_json(contents))


def unseal(sealed: Any, step: int) -> dict:
    """The contents that `seal` wrote for `step`. Raises Damaged for anything else."""
    text = sealed.get("manifest") if isinstance(sealed, dict) else None
    if not isinstance(text, str) or sealed != _with_checksum(text):
        raise Damaged("_CHECKPOINT_METADATA is missing or has changed")
    try:
        contents = json.loads(text)
        complete = all(
            {"shape", "dtype", "fingerprint"} <= leaf.keys() for leaf in contents["leaves"].values()
        )
        if (
            not complete
            or not {"step", "metric"} <= contents.keys()
            or not isinstance(contents["metadata"], dict)
        ):
            raise ValueError(contents)
        metric = contents["metric"]
        contents |= {
            "metric": None if metric is None else float(metric),
            "score": contents.get("score"),
        }
        if not isinstance(contents["score"], str | None):
            raise ValueError(contents)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged("_CHECKPOINT_METADATA is not what a checkpoint has") from None
    if contents["step"] != step:
        raise Damaged("_CHECKPOINT_METADATA is that of another step")
    return contents


def _with_checksum(text: str) -> dict[str, str]:
    return {
        "manifest": text,
        "sha256": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(),
    }


def compare(path: epath.Path, saved: dict[str, dict], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError, naming the first leaves that differ between checkpoint and model."""

    def text(shape, dtype):
        return f"{dtype}[{','.join(map(str, shape))}]"

    left = {name: text(leaf["shape"], leaf["dtype"]) for name, leaf in saved.items()}
    right = {name: text(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    pairs = {
        name: (left.get(name, "nothing"), right.get(name, "nothing"))
        for name in sorted(left | right)
    }
    if rows := [f"{name} is {a}, and {b} in the model" for name, (a, b) in pairs.items() if a != b]:
        advice = "use the config it was saved with, or another folder"
        raise CheckpointError(
            f"{path}: the checkpoint does not fit the model: {shortened(rows)}; {advice}"
        )


def named_leaves(tree: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Each leaf with its path, such as `params/layers/attention/query/kernel`.

    The order is that of `jax.tree.leaves`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [
        (prefix + jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in leaves
    ]
    if len(dict(named)) < len(named):
        raise ValueError(
            f"two leaves of the state have the same path: {sorted(name for name, _ in named)}"
        )
    return named


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def abstract_numbers(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf's numbers: of a typed key, those of its data."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
    )
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    # Raises if the shape does not divide. Orbax would report that with pages of traceback.
    sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shortened(names: list) -> str:
    return (", ".join(map(str, names[:3])) or "none") + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


# Fingerprints of arrays: any flipped bit changes them; mesh, sharding and order of sums do not.
def fingerprints(leaves: Iterable[Array]) -> list[str]:
    """16 hex digits for each array. All arrays are dispatched before the first result is read."""
    return [
        f"{int(a):08x}{int(b):08x}"
        for a, b in jax.device_get([block_if_simulated(fingerprint(leaf)) for leaf in leaves])
    ]


@jax.jit
def fingerprint(leaf: Array) -> Array:
    """`[sum_i h_i, sum_i h_i (2i + 1)] mod 2^32` with `h_i = mix(bits_i ^ hash(i))`, i the index.

    i is the logical index of a value, whatever the mesh.

    The mix is one-to-one and odd weights are invertible, so one changed value always changes both
    sums. The mix spreads every bit over the word; otherwise two flipped signs would cancel. One
    reduction computes both sums, because on a CPU one pass is 20 times as fast as two.
    """
    bits = to_bits(jax.device_put(leaf, jax.memory.Space.Device))  # it may lie in host memory
    index = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
        stride = stride * bits.shape[axis] % 2**32
    # The first constant is 2^32 / the golden ratio (Fibonacci hashing); the others are those of
    # MurmurHash3's finaliser.
    word = bits ^ (index * jnp.uint32(0x9E3779B1))
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    word = word ^ (word >> 16)
    zero = jnp.uint32(0)

    def add(a, b):
        return (a[0] + b[0], a[1] + b[1])

    return jnp.stack(
        lax.reduce((word, word * (2 * index + 1)), (zero, zero), add, range(bits.ndim))
    )


def key_data(leaf: Array) -> Array:
    """The numbers of a typed key; any other array unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def to_bits(leaf: Array) -> Array:
    """The array as uint32, one-to-one.

    Typed keys become their data; 64-bit and complex numbers become pairs on a last axis.
    """
    leaf = key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf.astype(jnp.uint32)
