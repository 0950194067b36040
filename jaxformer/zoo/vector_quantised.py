"""VQ-VAE: an image as a few codes, each the number of a vector in a code book that learns.

van den Oord et al. 2017, arXiv:1711.00937. The encoder is a ModelConfig with
`embedding=Patches(..., class_token=False)` and the head `CodeBook(...)`. Its state z of a patch is
replaced by the nearest vector e of the book. A decoder, which the head holds, draws the image:

    output = models.apply(model, params, images).heads["codes"]   # `Quantised`
    decode(model, params, output.codes)                           # [B, height, width, C]

`VectorQuantisation` is the objective that trains all three. Codes are tokens: a language model
that learns them paints images (Ramesh et al. 2021, arXiv:2102.12092).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import normal, zeros
from jaxtyping import Float, Int

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import transformer
from jaxformer.models.config import ModelConfig, Patches
from jaxformer.models.heads import Head
from jaxformer.models.inputs import Inputs
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Spec, Tree
from jaxformer.zoo.dit import Pixels


class Quantised(NamedTuple):
    """What the head says of images. T patches, W features of a code."""

    images: Float[Array, "B height width C"]  # drawn from the codes
    codes: Int[Array, "B T"]
    states: Float[Array, "B T W"]  # z, what the encoder says
    vectors: Float[Array, "B T W"]  # e, what the book has in its place


def nearest(z: Float[Array, "*rest W"], book: Float[Array, "K W"]) -> Int[Array, "*rest"]:
    """argmin_k |z - e_k|^2, the first of equals. Equation 1."""
    # a product of 8 bits, a TPU's default, would choose other codes
    products = jnp.einsum("...w,kw->...k", z, book, precision=lax.Precision.HIGHEST)
    squares = jnp.square(book).sum(axis=-1).reshape(*(1,) * (z.ndim - 1), -1)
    return jnp.argmin(squares - 2 * products, axis=-1)


def straight_through(
    z: Float[Array, "*rest W"], e: Float[Array, "*rest W"]
) -> Float[Array, "*rest W"]:
    """e, and the gradient of z: z + stop_gradient(e - z). Section 3.2."""
    return z + lax.stop_gradient(e - z)


class Use(NamedTuple):
    """The code book as averages over steps; e_k = sums_k / counts_k. Appendix A.1."""

    counts: Float[Array, " K"]  # N, states of a step that have the code
    sums: Float[Array, "K W"]  # m, the sum of these states

    def book(self) -> Float[Array, "K W"]:
        """The vectors of the codes. Before the first step they are the initial sums."""
        used = self.counts > 0
        return jnp.where(
            used[:, None], self.sums / jnp.where(used, self.counts, 1)[:, None], self.sums
        )


def moved(
    use: Use,
    z: Float[Array, "N W"],
    codes: Int[Array, " N"],
    weights: Float[Array, " N"],
    decay: float,
) -> Use:
    """N <- decay N + (1 - decay) n and m <- decay m + (1 - decay) sum z. Equations 6 and 7.

    A state of weight 0 does not count; it may be NaN.
    """
    of_code = jax.nn.one_hot(codes, len(use.counts), dtype=z.dtype) * weights[:, None]
    z = jnp.where(weights[:, None] > 0, z, 0)
    sums = jnp.einsum("nk,nw->kw", of_code, z, precision=lax.Precision.HIGHEST)
    rate = 1 - decay
    return Use(decay * use.counts + rate * of_code.sum(axis=0), decay * use.sums + rate * sums)


def restarted(
    use: Use, z: Float[Array, "N W"], weights: Float[Array, " N"], least: float, key: Array
) -> Use:
    """`use`, but each code with a count below `least` is a random state, with a count of 1.

    Dhariwal et al. 2020, arXiv:2005.00341, section 3.1. Without any weight nothing restarts.
    """
    # the n-th state that counts, for a random n of each code
    place = jnp.cumsum(weights > 0)
    n = jax.random.randint(key, use.counts.shape, 0, jnp.maximum(place[-1], 1))
    chosen = z[jnp.searchsorted(place, n, side="right")]
    restarts = (use.counts < least) & (place[-1] > 0)
    return Use(jnp.where(restarts, 1, use.counts), jnp.where(restarts[:, None], chosen, use.sums))


@dataclass(frozen=True)
class Vectors:
    """The embedding of the decoder: a linear map of the vector of each patch's code."""

    width: int  # W, features of a code
    patches: Patches  # of the images

    def __call__(self, config: ModelConfig) -> Embedder:
        shape = self.width, config.d_model
        start = normal(self.width**-0.5)
        spec = {"vectors": parameters.linear(shape, ("line", "embed"), ("line",), start, True)}

        def apply(
            params: Tree, e: Float[Array, "B T W"], inputs: Tree, context: Context
        ) -> Float[Array, "B T D"]:
            return linear("btw,wd->btd", e, params["vectors"])

        return Embedder(spec, apply, lambda e: self.patches.length)


@dataclass(frozen=True)
class CodeBook:
    """A head: the codes of an image's patches, and the image that a decoder draws from them.

    A linear map makes W features of each state. The decoder has the encoder's sizes, and
    `num_layers` layers. The book is two variables, so that a step moves it without a gradient.
    Raises ConfigError for an encoder that does not read patches alone.
    """

    count: int = 512  # K, codes of the book
    width: int = 64  # W, features of a code
    num_layers: int = 2  # layers of the decoder
    name: str = "codes"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("CodeBook.", self, count=2, width=1, num_layers=1)

    def decoder(self, config: ModelConfig) -> ModelConfig:
        """The stack that draws images from vectors [B, T, W]."""
        patches = config.embedding
        if not isinstance(patches, Patches):
            raise ConfigError(
                f"model.heads={self.name}: a code is that of a patch; expected "
                "embedding=Patches(class_token=False)"
            )
        return replace(
            config,
            num_layers=self.num_layers,
            embedding=Vectors(self.width, patches),
            heads=(Pixels(patches=patches),),
        )

    def __call__(self, config: ModelConfig) -> Head:
        decoder = self.decoder(config)
        shape = config.hidden_width, self.width
        start = normal(config.hidden_width**-0.5)
        spec = {
            "states": parameters.linear(shape, ("embed", "line"), ("embed",), start, True),
            "counts": Spec((self.count,), ("vocab",), zeros, trained=False),
            "sums": Spec((self.count, self.width), ("vocab", None), normal(1.0), trained=False),
            "decoder": transformer.spec(decoder),
        }

        def apply(params: Tree, hidden: Float[Array, "B T D"], *_: Any) -> Quantised:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            z = linear("btd,dw->btw", hidden, params["states"], wide)
            book = use_of(params).book().astype(wide)
            codes = nearest(z, book)
            e = book[codes]
            drawn = draw(decoder, params, straight_through(z, e).astype(hidden.dtype))
            return Quantised(drawn, codes, z, e)

        return Head(self.name, spec, apply)


def use_of(params: Tree) -> Use:
    """The averages of the head's parameters that are the book."""
    return Use(params["counts"], params["sums"])


def draw(
    decoder: ModelConfig, params: Tree, vectors: Float[Array, "B T W"]
) -> Float[Array, "B height width C"]:
    """The image of these vectors; `params` are those of the head."""
    output = transformer.encode(decoder, params["decoder"], Inputs(vectors))
    return transformer.read(decoder, params["decoder"], output).logits


def decode(
    model: ModelConfig, params: Tree, codes: Int[Array, "B T"]
) -> Float[Array, "B height width C"]:
    """The images of codes. A code that the book does not have is drawn as NaN."""
    head = head_of(model)
    tree = params["heads"][head.name]
    vectors = use_of(tree).book().at[codes].get(mode="fill", fill_value=jnp.nan)
    return draw(head.decoder(model), tree, vectors)


@dataclass(frozen=True)
class VectorQuantisation:
    """An objective: |x - x'|^2 + commitment |z - stop_gradient(e)|^2, each a mean over an image.

    The batch has `images` [B, height, width, C] and their `weights` [B]. After each step the book
    moves as `moved` and `restarted` say. Reported are `error`, the first term, and `codes_in_use`,
    exp of the entropy of the batch's codes, from 1 to K. With accumulation, the book is the mean of
    those of the parts of a batch, so a code that starts again is a mean of states, and the counts
    are those of a part. Equation 3 and appendix A.1. Raises ConfigError for a model without the
    head `CodeBook`, or one of your own with its fields `count`, `width` and `name`, parameters and
    output.
    """

    commitment: float = 0.25  # beta, the weight of the second term
    decay: float = 0.99  # of the averages that are the book
    least: float = 0.03  # states of a step, on average; a code with fewer starts again

    def __post_init__(self):
        check_numbers("objective.", self, commitment=0, least=0)
        if not 0 <= self.decay < 1:
            raise ConfigError(f"objective.decay={self.decay}: must be in [0, 1)")

    def __call__(self, model: Any, params: Tree, batch: Tree, context: Any) -> LossSums:
        head = head_of(model)
        model_key, restart_key = jax.random.split(context.key)
        images = batch["images"]
        output = models.apply(model, params, images, dropout_key=model_key, dtype=context.dtype)
        found = output.heads[head.name]
        z, e = found.states, lax.stop_gradient(found.vectors)
        errors = jnp.square(found.images - images.astype(found.images.dtype)).mean(axis=(1, 2, 3))
        committed = jnp.square(z - e).mean(axis=(1, 2))
        weights = batch["weights"].astype(z.dtype)
        error = weighted_sum(errors, weights)
        loss = error + self.commitment * weighted_sum(committed, weights)

        T = z.shape[1]
        states = lax.stop_gradient(z).reshape(-1, head.width)
        counted = jnp.repeat((weights > 0).astype(z.dtype), T)
        use = use_of(params["heads"][head.name])
        use = moved(use, states, found.codes.reshape(-1), counted, self.decay)
        use = restarted(use, states, counted, self.least, restart_key)
        in_use = codes_in_use(found.codes, counted.reshape(-1, T), head.count)
        metrics = {
            "error": (error, weights.sum()),
            "codes_in_use": (in_use * weights.sum(), weights.sum()),
        }
        updates = {"heads": {head.name: use._asdict()}}
        sums = LossSums(loss, weights.sum(), metrics, updates, unit="images")
        return with_own(sums, output)


def codes_in_use(
    codes: Int[Array, "B T"], weights: Float[Array, "B T"], count: int
) -> Float[Array, ""]:
    """exp(- sum_k p_k log p_k), where p_k is the share of code k. 1 for no code at all."""
    used = jnp.zeros(count, weights.dtype).at[codes].add(weights)
    p = used / jnp.maximum(used.sum(), 1)
    return jnp.exp(-jax.scipy.special.xlogy(p, p).sum())


def head_of(model: Any) -> Any:
    """The model's code book, or one of your own. Raises ConfigError if there is none."""
    for head in getattr(model, "heads", ()):
        if hasattr(head, "count") and hasattr(head, "width") and hasattr(head, "name"):
            return head
    raise ConfigError(
        f"model.heads={getattr(model, 'heads', None)}: expected zoo.vector_quantised.CodeBook(...)"
    )
