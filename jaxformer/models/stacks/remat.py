"""What a layer keeps for its backward pass: `ModelConfig.remat`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.models.config import ModelConfig
from jaxformer.ops.einsum import PRODUCT
from jaxformer.sharding import platform

# the words of `ModelConfig.remat`
POLICIES = ("none", "dots", "qkv", "attention", "full", "offload")
HEADS = ("query", "key", "value")  # the names of what attention reads, for policies
LAYER_INPUT = "layer_input"  # the name of the residual stream that a layer reads, for policies
# why "offload" is refused
GPU_SCAN = (
    "remat=offload on a GPU: XLA may give the backward pass of a scan the kept inputs in the wrong "
    "order, without an error (openxla/xla#46231); give unroll=num_layers, or remat=full"
)


def remat(config: ModelConfig, f: Callable, in_scan: bool) -> Callable:
    """f under `jax.checkpoint`: it keeps for the backward pass what `ModelConfig.remat` says.

    Gathered weights are never kept: they are gathered again. Raises NotImplementedError for
    "offload" in a scan on a GPU.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # within a scan the loop separates the two passes, so nothing else has to prevent CSE
    checkpoint = partial(jax.checkpoint, f, prevent_cse=not in_scan)
    match config.remat:
        case "none":
            gathers = not mesh.empty and mesh.shape.get("fsdp", 1) > 1
            return checkpoint(policy=_save_all_but_cheap) if gathers else f
        case "dots":
            return checkpoint(policy=_save_products)
        case "qkv":
            return checkpoint(policy=_save_around_attention)
        case "attention":
            return checkpoint(policy=_save_attention)
        case "full":
            return checkpoint()
        case "offload":
            if in_scan and platform() == "gpu":
                raise NotImplementedError(GPU_SCAN)
            return _checkpoint_by_name(f, _offload_layer_inputs(), in_scan)
    return _checkpoint_by_name(f, config.remat, in_scan)  # a policy of the user's own


def _checkpoint_by_name(f: Callable, policy: Any, in_scan: bool) -> Callable:
    """f under a policy that sees the residual stream by its name, `LAYER_INPUT`."""

    def with_named_input(flow, *inputs):
        return f(flow._replace(x=jax.tree.map(_named_input, flow.x)), *inputs)

    return jax.checkpoint(with_named_input, policy=policy, prevent_cse=not in_scan)


def _named_input(x):
    return checkpoint_name(x, LAYER_INPUT)


def _offload_layer_inputs() -> Callable:
    """Keeps the input of each layer in the memory of the host, and nothing else.

    The transfers run beside the products of other layers. A device keeps one layer's arrays, so
    that longer texts and larger batches fit than with `full`.
    """
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )


def _save_products(primitive, *operands, **options) -> bool:
    """Saves products with weights.

    Those of `ops.einsum` are recognised by their name, after rounding. Others, a user's own, are
    products without batch axes.
    """
    if primitive.name == "name":
        return options["name"] == PRODUCT
    if primitive.name != "dot_general":
        return False
    _, (batch, _) = options["dimension_numbers"]
    return not batch and options["preferred_element_type"] in (None, operands[0].dtype)


def _save_attention(primitive, *_, name: str = "", **__) -> bool:
    """Saves the results of attention kernels.

    Our kernels name their results. cuDNN's forward pass is a primitive of its own.
    """
    if primitive.name == "name":
        return name == "attention"
    return primitive.name.startswith("dot_product_attention_fwd")


def _save_around_attention(primitive, *operands, **options) -> bool:
    """Saves the results of attention kernels, and the queries, keys and values that they read."""
    if primitive.name == "name" and options["name"] in HEADS:
        return True
    return _save_attention(primitive, *operands, **options)


# Primitives that cost nothing to compute again. A gathered weight is only sharded or cast again;
# the others run beside a product. Their float32 arrays would be most of what a layer in 16 bits
# keeps. So the policy also looks into functions that are recomputed, such as activations and norms.
_CHEAP = {
    "sharding_constraint", "all_gather", "convert_element_type", "add", "sub", "mul", "div", "neg",
    "exp", "log", "erf", "tanh", "logistic", "rsqrt", "sqrt", "square", "integer_pow", "max", "min",
    "select_n", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "concatenate",
    "slice", "split", "iota", "reduce_sum", "reduce_max", "stop_gradient",
}  # fmt: skip


def _save_all_but_cheap(primitive, *operands, call_jaxpr=None, name: str = "", **_) -> bool:
    """Saves every value that is not cheap to compute again (`_CHEAP`), and gathered vectors.

    Cheap values are sharded or cast copies, and elementwise functions of saved values.
    """
    if primitive.name == "name" and name in HEADS:
        return False  # what it names is a value that is saved already, or cheap
    names = [primitive.name]
    if call_jaxpr is not None:
        names = [equation.primitive.name for equation in call_jaxpr.eqns]
    is_of_vectors = bool(operands) and all(x.ndim <= 1 for x in operands)
    if is_of_vectors and "broadcast_in_dim" not in names:
        return True
    return not all(name in _CHEAP for name in names)
