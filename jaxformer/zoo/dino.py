"""DINO: a student learns what an average of itself, the teacher, says of another view of an image.

Caron et al. 2021, arXiv:2104.14294. Features form that tell classes apart without any label. The
teacher and the centre are variables of the objective (`Spec(trained=False)`), so they are in the
checkpoint beside the parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import normal, zeros
from jaxtyping import Float

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import heads
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import Head
from jaxformer.models.layer import linear
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Spec, Tree
from jaxformer.zoo.sinkhorn import balanced

View = Callable[[Array, Array], Array]  # (key, images [B, H, W, C]) -> images of the same shape
TINY = 1e-12  # the least length of a vector that is divided by its length


def unit(x: Float[Array, "*rest D"], axis: int = -1) -> Float[Array, "*rest D"]:
    """x / |x|; a zero vector stays zero, and its gradient is zero."""
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    is_zero = square <= TINY**2
    return jnp.where(is_zero, 0, x * lax.rsqrt(jnp.where(is_zero, 1, square)))


def entropy(p: Float[Array, "*rest K"]) -> Float[Array, "*rest"]:
    """- sum_k p_k log p_k, in nats."""
    return -jax.scipy.special.xlogy(p, p).sum(axis=-1)


def mean_of_images(
    values: Float[Array, "V B K"], weights: Float[Array, " B"]
) -> Float[Array, " K"]:
    """The mean over views and images; images of weight 0 may be NaN. No weight at all: zeros."""
    counted = jnp.where(weights[None, :, None] > 0, values, 0)
    total = jnp.maximum(weights.sum(), jnp.finfo(values.dtype).tiny)
    return jnp.einsum("vbk,b->k", counted, weights / total) / len(values)


def centred(
    scores: Float[Array, "W B K"],
    centre: Float[Array, " K"],
    weights: Float[Array, " B"],
    temperature: float,
) -> Float[Array, "W B K"]:
    """softmax((s - c) / T): what the teacher says. Caron et al. 2021, section 3.1."""
    return jax.nn.softmax((scores - centre[None, None]) / temperature, axis=-1)


def between_views(
    told: Float[Array, "W B K"], scores: Float[Array, "V B K"], temperature: float
) -> Float[Array, " B"]:
    """The mean over pairs of different views of - sum_k p_k log softmax(s / T)_k, for each image.

    The first W student views are those that the teacher sees, too. Caron et al. 2021, equation 3.
    """
    logs = jax.nn.log_softmax(scores / temperature, axis=-1)
    pairs = -jnp.einsum("wbk,vbk->wvb", told, logs)
    other = 1 - jnp.eye(len(told), len(scores), dtype=pairs.dtype)
    return jnp.einsum("wvb,wv->b", pairs, other) / other.sum()


@dataclass(frozen=True)
class Prototypes:
    """A head: an MLP with GELU, then cosines with `count` learned directions, `[B, count]`.

    The MLP has two hidden layers. Its answer is scaled to length 1, and so is each direction.
    Caron et al. 2021, section 3.1 and appendix C.
    """

    count: int = 65_536  # K, directions
    hidden: int = 2048  # features of the MLP's hidden layers
    bottleneck: int = 256  # features of its answer
    pool: str = "position_0"  # the state that is read; "mean" for a model without a class token
    name: str = "prototypes"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("Prototypes.", self, count=2, hidden=1, bottleneck=1)

    def __call__(self, config: ModelConfig) -> Head:
        widths = config.d_model, self.hidden, self.hidden, self.bottleneck
        start = normal(config.std)

        def matrix(i: int) -> Tree:
            axes = ("embed", "mlp") if i == 0 else ("mlp", None)
            return parameters.linear(widths[i : i + 2], axes, axes[:1], start, bias=True)

        spec = {f"map_{i}": matrix(i) for i in range(3)}
        spec["directions"] = Spec((self.bottleneck, self.count), (None, "vocab"), normal(1.0))

        def apply(params: Tree, hidden: Float[Array, "B T D"], padding_mask, inputs: Tree) -> Array:
            x = heads.pool(hidden, self.pool, padding_mask)
            for i in range(3):
                x = linear("bd,df->bf", x, params[f"map_{i}"])
                x = jax.nn.gelu(x, approximate=False) if i < 2 else x
            wide = jnp.promote_types(x.dtype, jnp.float32)
            directions = unit(params["directions"].astype(wide), axis=0)
            return unit(x.astype(wide)) @ directions

        return Head(self.name, spec, apply)


@dataclass(frozen=True)
class SelfDistillation:
    """An objective: cross entropy of the student with its teacher, over pairs of different views.

    The batch has `images` [B, H, W, C] and their `weights` [B]. The teacher sees two views, the
    student sees them and `small_views` others. After each step the teacher moves towards the
    student: t + (1 - momentum) (s - t); before the first step it equals the student. The centre
    moves in the same way towards the mean of the teacher's scores, so that no direction wins
    everywhere. For batches of some dozen images `targets=zoo.balanced` is safer. Reported are the
    entropy of the teacher's mean answer (`spread`, at most log K), and how much an answer tells
    about its image, the spread less the mean entropy of the answers (`information`, in nats). After
    a collapse to one direction both are 0; after a collapse to all directions alike, the spread is
    log K, and the information is 0. Caron et al. 2021, algorithm 1 and section 5.3.
    Raises ConfigError for a model without the head `Prototypes`, and for views of another shape.
    """

    view: View  # what the teacher and the student see
    # what the student alone sees, such as a part of the image; None: `view`
    small_view: View | None = None
    small_views: int = 0  # of each image
    momentum: float = 0.996  # of the teacher
    centre_momentum: float = 0.9  # of the centre
    teacher_temperature: float = 0.04  # of the teacher's answers
    temperature: float = 0.1  # of the student's
    # what the teacher says, `centred` or `zoo.balanced`:
    # (scores [W, B, K], centre [K], weights [B], temperature) -> [W, B, K]
    targets: Callable = centred
    # Whether parts of a batch would have another loss (`objectives.objective`). A function of your
    # own says so by an attribute of this name.
    whole_batch = property(
        lambda self: self.targets is balanced or getattr(self.targets, "whole_batch", False)
    )

    def __post_init__(self):
        check_numbers("objective.", self, small_views=0)
        for name in ("momentum", "centre_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"objective.{name}={getattr(self, name)}: must be in [0, 1)")
        for name in ("teacher_temperature", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"objective.{name}={getattr(self, name)}: must be above 0")

    def spec(self, model: Any) -> Tree:
        """The teacher, and the centre of its scores: variables."""

        def variable(leaf: Spec) -> Spec:
            return replace(leaf, trained=False)

        teacher = jax.tree.map(variable, models.spec(model))
        count = head_of(model).count
        return {"teacher": teacher, "centre": Spec((count,), ("vocab",), zeros, trained=False)}

    def __call__(self, model: Any, params: Tree, batch: Tree, context: Any) -> LossSums:
        head = head_of(model)
        *view_keys, model_key = jax.random.split(context.key, 3 + self.small_views)
        images = batch["images"]
        small_view = self.small_view or self.view
        seen = [self.view(key, images) for key in view_keys[:2]]
        seen += [small_view(key, images) for key in view_keys[2:]]
        check_views(images, seen)

        def scores(config: Any, tree: Tree, shown: list, key: Any = None) -> tuple[Array, Any]:
            inputs = jnp.concatenate(shown).astype(images.dtype)
            output = models.apply(config, tree, inputs, dropout_key=key, dtype=context.dtype)
            answers = output.heads[head.name]
            return answers.reshape(len(shown), len(images), -1), output

        teacher = self.teacher(params, context)
        known, _ = scores(models.evaluation(model), teacher, seen[:2])
        weights = batch["weights"].astype(known.dtype)
        known, centre = lax.stop_gradient((known, context.params["centre"]))
        told = self.targets(known, centre, weights, self.teacher_temperature)
        answers, output = scores(model, params, seen, model_key)
        errors = between_views(told, answers, self.temperature)
        sums = LossSums(weighted_sum(errors, weights), weights.sum(), unit="images")
        spread = entropy(mean_of_images(told, weights))
        information = spread - mean_of_images(entropy(told)[..., None], weights)[0]
        reported = {"spread": spread, "information": information}
        metrics = {name: (value * sums.weight, sums.weight) for name, value in reported.items()}
        change = mean_of_images(known, weights) - centre
        variables = {
            "teacher": jax.tree.map(self.moved, teacher, params),
            "centre": centre + (1 - self.centre_momentum) * change,
        }
        return with_own(replace(sums, metrics=metrics, updates={"objective": variables}), output)

    def teacher(self, params: Tree, context: Any) -> Tree:
        """The teacher's parameters: before the first step, those of the student."""
        is_first = jnp.asarray(context.step) == 0

        def choose(student: Array, teacher: Array) -> Array:
            return lax.stop_gradient(jnp.where(is_first, student, teacher))

        return jax.tree.map(choose, params, context.params["teacher"])

    def moved(self, teacher: Array, student: Array) -> Array:
        """t + (1 - momentum) (s - t)."""
        return teacher + (1 - self.momentum) * (lax.stop_gradient(student) - teacher)

    def example(self, model: Any, batch: Tree) -> Tree:
        """The inputs of the model for a report: the image as it is."""
        return {"images": batch["images"]}


def head_of(model: Any) -> Any:
    """The head that the objective reads: the first one that counts directions.

    It is a `Prototypes`, or a head of your own with `count` and `name`. Raises ConfigError.
    """
    found = getattr(model, "heads", ())
    head = next((head for head in found if hasattr(head, "count")), None)
    if head is None:
        raise ConfigError(
            "objective: SelfDistillation needs a model with the head zoo.dino.Prototypes(...), or "
            f"one of your own with the attributes count and name; got heads={found}"
        )
    return head


def check_views(images: Array, views: list[Array]) -> None:
    """Raises ConfigError unless each view has the shape of the images."""
    for number, view in enumerate(views):
        if view.shape != images.shape:
            raise ConfigError(
                f"objective: view {number} gives {list(view.shape)} for images "
                f"{list(images.shape)}; expected the same shape"
            )
