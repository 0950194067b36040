"""Disentangled attention: content and relative positions meet in separate products.

DeBERTa: He et al. 2020, arXiv:2006.03654, section 3.1; version 3: arXiv:2111.09543.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops, params
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.checks import require_numbers
from jaxformer.models.config import Axial, Embedding, Learned, ModelConfig, Sinusoidal
from jaxformer.models.layer import Context, Mixer, Tree, linear
from jaxformer.models.mixers.attention import attention
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.presets import sized
from jaxformer.ops.einsum import einsum
from jaxformer.params import Spec

# content of a query with the position of a key, and content of a key with the position of a query
TERMS = "c2p", "p2c"


def log_buckets(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Signed buckets of distances: each one below `buckets // 2`, then by the logarithm.

    The distance `max_distance - 1` has the bucket `2 (buckets // 2) - 1`. As in the published
    code, in float32.
    """
    middle = buckets // 2
    size = np.abs(distance)
    ratio = np.maximum(size, middle).astype(np.float32) / np.float32(middle)
    steps = np.log(ratio) / np.log(np.float32((max_distance - 1) / middle)) * (middle - 1)
    far = np.sign(distance) * (np.ceil(steps) + middle)
    return np.where(size <= middle, distance, far).astype(int)


@dataclass(frozen=True)
class Disentangled:
    """Attention with scores (q_i . k_j + q_i . K_d + k_j . Q_d) / sqrt((1 + terms) H).

    He et al. 2020, eq. 2-4. d is the bucket of i - j, and K and Q are maps of a table of 2
    `buckets` rows that all layers share. Distances are those of indices, not of `positions`.
    Raises ConfigError for key heads, and for positions that act inside attention.
    """

    buckets: int = 256  # half of the rows: those of one sign
    # distances are by the logarithm up to here; None: each has a row, up to `buckets`
    max_distance: int | None = 512
    terms: tuple[str, ...] = TERMS  # some of `TERMS`
    own_maps: bool = False  # whether K and Q have maps of their own, not those of keys and queries
    norm: bool = True  # whether the model's norm is applied to the table

    _check = require_numbers(buckets=2, max_distance=1)

    def __post_init__(self):
        self._check()
        if not self.terms or self.terms != tuple(term for term in TERMS if term in self.terms):
            raise ConfigError(f"Disentangled.terms={self.terms}: expected some of {TERMS}")
        if self.max_distance is not None and self.max_distance - 1 <= self.buckets // 2:
            raise ConfigError(
                f"Disentangled.max_distance={self.max_distance}: expected more than half of "
                f"buckets={self.buckets}, and one more"
            )

    def __call__(self, config: ModelConfig) -> Mixer:
        if config.kv_heads != config.num_heads:
            raise ConfigError(
                f"model.num_kv_heads={config.num_kv_heads}: keys of disentangled attention are not "
                "shared by heads; omit it"
            )
        if not isinstance(config.positions, Learned | Sinusoidal | Axial | None):
            raise ConfigError(
                f"model.positions={config.positions}: disentangled attention has its own; "
                "give a table of the embedding, or None"
            )
        table = Spec((2 * self.buckets, config.d_model), (None, "embed"), normal(config.std))
        shared: Tree = {"relative": table}
        if self.norm:
            shared["relative_norm"] = norm_spec(config)
        mixer = attention(config, extra=self.maps(config), attend=partial(self.attend, config))
        return mixer._replace(shared=shared, state=None, rolls=False)

    def maps(self, config: ModelConfig) -> Tree:
        """The maps of the table, for each term, if they are its own."""
        if not self.own_maps:
            return {}
        shape = config.d_model, config.num_heads, config.head_size
        axes = "embed", "heads", "head"
        names = {"c2p": "key", "p2c": "query"}
        return {
            f"position_{names[term]}": params.linear(
                shape, axes, ("embed",), normal(config.std), config.has_bias(names[term])
            )
            for term in self.terms
        }

    def attend(
        self,
        config: ModelConfig,
        tree: Tree,
        context: Context,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        value: Float[Array, "B S N H"],
        **options,
    ) -> Array | tuple[Array, Array]:
        """`ops.attention` with the terms of the positions as its bias."""
        scale = options["scale"] or (config.head_size * (1 + len(self.terms))) ** -0.5
        prefix = "position_" if self.own_maps else ""
        table = self.table(config, context)
        of_pairs = self.rows(query.shape[1])
        bias = 0.0
        if "c2p" in self.terms:
            rows = linear("rd,dnh->rnh", table, tree[prefix + "key"])
            bias = bias + _pick(query, rows, of_pairs)
        if "p2c" in self.terms:
            rows = linear("rd,dnh->rnh", table, tree[prefix + "query"])
            bias = bias + _pick(key, rows, of_pairs.T).swapaxes(2, 3)
        options |= {"scale": scale, "bias": bias * scale}
        return ops.attention(query, key, value, **options)

    def table(self, config: ModelConfig, context: Context) -> Float[Array, "R D"]:
        """The table of relative positions, after its norm and its dropout."""
        shared = context.shared
        table = shared["relative"]
        if self.norm:
            table = norm(config, shared["relative_norm"], table)
        key = context.dropout_key
        key = None if key is None else jax.random.fold_in(key, 1)
        return ops.dropout(table, config.dropout_rate, key)

    def rows(self, length: int) -> np.ndarray:
        """The row of the table for each query and key, `[T, T]`."""
        index = np.arange(length)
        distance = index[:, None] - index[None]
        if self.max_distance is not None:
            distance = log_buckets(distance, self.buckets, self.max_distance)
        return np.clip(distance + self.buckets, 0, 2 * self.buckets - 1)


def _pick(
    x: Float[Array, "B T N H"], rows: Float[Array, "R N H"], of_pairs: np.ndarray
) -> Float[Array, "B N T S"]:
    """x_t . rows[of_pairs[t, s]] for each head."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    products = einsum("btnh,rnh->bntr", x, rows, dtype=wide)
    index = jnp.broadcast_to(of_pairs, (*products.shape[:2], *of_pairs.shape))
    return jnp.take_along_axis(products, index, axis=3)


# He et al. 2021, arXiv:2111.09543, table 2: the encoders, without heads
deberta_v3_base = ModelConfig(
    vocab_size=128_100,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=512,
    feedforward="gelu",
    norm_eps=1e-7,
    block=post_norm,
    positions=None,
    masks=(full(),),
    mixer=Disentangled(),
    embedding=Embedding(norm=True),
    heads=(),
    dropout_rate=0.1,
    attention_dropout_rate=0.1,
)
deberta_v3_xsmall = sized(deberta_v3_base, 12, 384, 6)
deberta_v3_small = sized(deberta_v3_base, 6, 768, 12)
deberta_v3_large = sized(deberta_v3_base, 24, 1024, 16)
