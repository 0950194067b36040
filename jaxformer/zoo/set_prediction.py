"""The loss of DETR: predictions and objects are matched one to one, whatever their order.

A batch has `images` and, for each image, its objects in rows of equal length: `classes` [B, M],
`boxes` [B, M, 4] and `is_object` [B, M], 0 for padding. `weights` [B] is 0 for an image that does
not count. A box is (x, y) of the centre, width and height, as fractions of the image.
Carion et al. 2020, arXiv:2005.12872, section 3.1 and appendix A.2.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped
from optax.assignment import hungarian_algorithm

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import transformer
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import same_stream
from jaxformer.models.norm import norm
from jaxformer.models.reports import with_own
from jaxformer.models.stacks import layout
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Tree
from jaxformer.zoo.detr import object_numbers

LAYERS = "decoder/layers/*/residual"  # the name of the streams after the decoder's layers


def corners(boxes: Float[Array, "*rest 4"]) -> Float[Array, "*rest 4"]:
    """(left, top, right, bottom) of boxes (x, y, width, height) around their centres."""
    centre, size = jnp.split(boxes, 2, axis=-1)
    return jnp.concatenate([centre - size / 2, centre + size / 2], axis=-1)


def area(box: Float[Array, "*rest 4"]) -> Float[Array, "*rest"]:
    """The area of boxes given by their corners."""
    return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])


def generalised_iou(
    a: Float[Array, "*#rest 4"], b: Float[Array, "*#rest 4"]
) -> Float[Array, "*rest"]:
    """|A and B| / |A or B| - (|C| - |A or B|) / |C|, where the box C is the hull of A and B.

    Boxes are (x, y, width, height). Rezatofighi et al. 2019, arXiv:1902.09630.
    """
    a, b = corners(a), corners(b)
    low = jnp.maximum(a[..., :2], b[..., :2])
    high = jnp.minimum(a[..., 2:], b[..., 2:])
    both = jnp.prod(jnp.maximum(high - low, 0), axis=-1)
    either = area(a) + area(b) - both
    hull_low = jnp.minimum(a[..., :2], b[..., :2])
    hull_high = jnp.maximum(a[..., 2:], b[..., 2:])
    hull = jnp.prod(hull_high - hull_low, axis=-1)
    # a box of no area has no overlap with itself
    return divided(both, either) - divided(hull - either, hull)


def divided(x: Array, y: Array) -> Array:
    """x / y, and 0 where y is 0."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)


def match(cost: Float[Array, "B Q M"], is_object: Shaped[Array, "B M"]) -> Int[Array, "B M"]:
    """The query of each object, so that the sum of the objects' costs is smallest. Q >= M.

    Padding gets one of the other queries.
    """
    of_objects = jnp.where(is_object[:, None] > 0, cost, 0)

    def of_image(cost: Float[Array, "Q M"]) -> Int[Array, " M"]:
        queries, objects = hungarian_algorithm(cost)
        return jnp.zeros(cost.shape[1], jnp.int32).at[objects].set(queries)

    return jax.vmap(of_image)(of_objects)


def read_layer(decoder: ModelConfig, params: Tree, residual: Float[Array, "B Q D"]) -> Any:
    """The outputs of the heads for the stream after a layer, behind the model's last norm.

    Raises ConfigError for a block that ends in another way.
    """
    block = layout.kinds(decoder, decoder.d_model)[0].block
    at_the_end = set(block.stack_spec or {})
    if at_the_end - {"final_norm"} or not (at_the_end or block.end is same_stream):
        raise ConfigError(
            "objective.every_layer=True: the decoder's block ends with more than a norm, which the "
            "earlier layers cannot have; set it to False"
        )
    hidden = norm(decoder, params["final_norm"], residual) if at_the_end else residual
    return transformer.read(decoder, params, models.Output(None, hidden)).heads


def check_model(model: Any) -> None:
    """Raises ConfigError for a model that answers without a set of classes and boxes."""
    heads = getattr(getattr(model, "decoder", None), "heads", ())
    names = {getattr(head, "name", None) for head in heads}
    if not names >= {"classes", "boxes"}:
        raise ConfigError(
            "model: SetPrediction needs an EncoderDecoder whose decoder has the heads "
            "zoo.ObjectClasses(classes) and zoo.Boxes(), or your own with the names classes, boxes"
        )


@dataclass(frozen=True)
class SetPrediction:
    """The sum of w CE over queries, and of box |b - b'|_1 + overlap (1 - GIoU(b, b')) over objects.

    Each object is compared with the query that `match` gives it, by the cost
    -p(class) + box |b - b'|_1 - overlap GIoU. A query without an object should say "no object", the
    last class; w is 1 for objects, and `no_object` for these. The loss is a mean over images, so an
    image without objects counts, too; Carion et al. 2020 divide the first term by the sum of w, and
    the others by the number of objects. These quotients are reported: `class_loss`,
    `box_distance`, `box_iou_lacking`. With `every_layer`, training adds the loss of each earlier
    layer of the decoder. A class that does not exist gives NaN.

    Raises ConfigError for a model without the two heads, and for more objects than queries.
    """

    no_object: float = 0.1  # weight of the class "no object"
    box: float = 5.0  # weight of the distance of boxes
    overlap: float = 2.0  # weight of their overlap
    every_layer: bool = True  # the heads read each layer of the decoder, not the last one alone

    def __post_init__(self):
        check_numbers("objective.", self, no_object=0, box=0, overlap=0)

    def evaluation(self) -> "SetPrediction":
        return replace(self, every_layer=False)

    def __call__(self, model: Any, params: Any, batch: dict, context: Any) -> LossSums:
        check_model(model)
        images = batch["images"]
        output = models.apply(
            model,
            params,
            object_numbers(model, len(images)),
            source=images,
            intermediates=(LAYERS,) if self.every_layer else (),
            dropout_key=context.key,
            dtype=context.dtype,
        )
        sums = self.of_predictions(output.heads["classes"], output.heads["boxes"], batch)
        loss = sums.loss
        if self.every_layer:
            for residual in output.intermediates[LAYERS][:-1]:
                heads = read_layer(model.decoder, params["decoder"], residual)
                loss += self.of_predictions(heads["classes"], heads["boxes"], batch).loss
        return with_own(replace(sums, loss=loss), output)

    def of_predictions(
        self, logits: Float[Array, "B Q C"], boxes: Float[Array, "B Q 4"], batch: dict
    ) -> LossSums:
        """The sums of logits and boxes of all queries."""
        B, Q, C = logits.shape
        M = batch["classes"].shape[1]
        if M > Q:
            raise ConfigError(
                f"data: {M} objects in an image, and {Q} queries; a query finds one object: give "
                "model.decoder.context_length at least as many"
            )
        is_object = (batch["is_object"] > 0) & (batch["weights"][:, None] > 0)
        # what stands in padding may be anything, also NaN
        goals = jnp.where(is_object[..., None], batch["boxes"], 0.5)
        nothing = C - 1
        is_known = (batch["classes"] >= 0) & (batch["classes"] < nothing)
        classes = jnp.where(is_known | ~is_object, batch["classes"], C)  # C: out of bounds, NaN
        classes = jnp.where(is_object, classes, nothing)
        cost = self.cost(*jax.lax.stop_gradient((logits, boxes)), classes, goals)
        queries = match(cost, is_object)
        found = jnp.take_along_axis(boxes, queries[..., None], axis=1)
        distances = jnp.abs(found - goals).sum(axis=-1)
        lacking = 1 - generalised_iou(found, goals)
        distances, lacking = (jnp.where(is_object, each, 0) for each in (distances, lacking))
        # padding is written to query Q, which is out of bounds: nowhere
        places = jnp.where(is_object, queries, Q)
        wanted = (
            jnp.full((B, Q), nothing).at[jnp.arange(B)[:, None], places].set(classes, mode="drop")
        )
        importance = jnp.where(wanted == nothing, self.no_object, 1.0)
        log_probabilities = jax.nn.log_softmax(logits)
        of_wanted = jnp.take_along_axis(log_probabilities, wanted[..., None], axis=-1)[..., 0]
        errors = -(importance * of_wanted).sum(axis=1)

        weights = batch["weights"].astype(logits.dtype)
        of_boxes = (self.box * distances + self.overlap * lacking).sum(axis=1)
        count = is_object.sum().astype(logits.dtype)
        metrics = {
            "class_loss": (
                weighted_sum(errors, weights),
                weighted_sum(importance.sum(axis=1), weights),
            ),
            "box_distance": (distances.sum(), count),
            "box_iou_lacking": (lacking.sum(), count),
        }
        loss = weighted_sum(errors + of_boxes, weights)
        return LossSums(loss, weights.sum(), metrics, unit="images")

    def cost(
        self,
        logits: Float[Array, "B Q C"],
        boxes: Float[Array, "B Q 4"],
        classes: Int[Array, "B M"],
        goals: Float[Array, "B M 4"],
    ) -> Float[Array, "B Q M"]:
        """The cost of each query for each object: a class and a box, the goal."""
        B, Q, _ = logits.shape
        probabilities = jax.nn.softmax(logits)
        index = jnp.broadcast_to(classes[:, None], (B, Q, classes.shape[1]))
        of_class = jnp.take_along_axis(probabilities, index, axis=2)
        found, wanted = boxes[:, :, None], goals[:, None]
        distance = jnp.abs(found - wanted).sum(axis=-1)
        return self.box * distance - of_class - self.overlap * generalised_iou(found, wanted)
