"""Queries and keys with a layer norm before their product: Dehghani et al. 2023, arXiv:2302.05442.

ViT-22B trains only with it, because its scores grew without bound.
"""

from jax import Array
from jax.nn.initializers import ones
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer
from jaxformer.models.mixers.attention import Heads, attention
from jaxformer.params import Spec, Tree


def qk_layer_norm(config: ModelConfig) -> Mixer:
    """LayerNorm of each head of queries and keys before the rotation, without a bias.

    Each head has a scale of its own, `[N, H]` and `[K, H]`. Dehghani et al. 2023, arXiv:2302.05442,
    section 2.1. StableLM 2 12B and Cohere's Command R+ have it.
    """

    def spec(heads: int, axis: str) -> Tree:
        return {"scale": Spec((heads, config.head_size), (axis, "head"), ones)}

    def normed(x: Float[Array, "B T N H"], params: Tree) -> Float[Array, "B T N H"]:
        unscaled = ops.layer_norm(x.astype(params["scale"].dtype), None, None, config.norm_eps)
        return (unscaled * params["scale"][None, None]).astype(x.dtype)

    def prepare(params: Tree, heads: Heads, context: Context) -> Heads:
        query = normed(heads.query, params["query_norm"])
        return heads._replace(query=query, key=normed(heads.key, params["key_norm"]))

    extra = {
        "query_norm": spec(config.num_heads, "heads"),
        "key_norm": spec(config.kv_heads, "kv_heads"),
    }
    return attention(config, extra=extra, prepare=prepare)
