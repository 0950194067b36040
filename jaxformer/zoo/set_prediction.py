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
from jaxtyping import Float, Int
from optax.assignment import hungarian_algorithm

from jaxformer import models
from jaxformer.errors import check_numbers
from jaxformer.models import transformer
from jaxformer.models.config import ModelConfig
from jaxformer.models.norm import norm
from jaxformer.ops.losses import LossSums
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


def match(
    cost: Float[Array, "B Q M"], is_object: Int[Array, "B M"] | Float[Array, "B M"]
) -> Int[Array, "B M"]:
    """The query of each object, so that the sum of the objects' costs is smallest. Q >= M.

    Padding gets one of the other queries.
    """
    of_objects = jnp.where(is_object[:, None] > 0, cost, 0)

    def of_image(cost: Float[Array, "Q M"]) -> Int[Array, " M"]:
        queries, objects = hungarian_algorithm(cost)
        return jnp.zeros(cost.shape[1], jnp.int32).at[objects].set(queries)

    return jax.vmap(of_image)(of_objects)


def read_layer(decoder: ModelConfig, params: Tree, residual: Float[Array, "B Q D"]) -> Any:
    """The outputs of the heads for the stream after a layer, behind the model's last norm."""
    hidden = norm(decoder, params["final_norm"], residual)
    return transformer.read(decoder, params, models.Output(None, hidden)).heads


@dataclass(frozen=True)
class SetPrediction:
    """(sum of w CE + box |b - b'|_1 + overlap (1 - GIoU(b, b'))) / number of objects.

    Each object is compared with the query that `match` gives it, by the cost
    -p(class) + box |b - b'|_1 - overlap GIoU. A query without an object should say "no object", the
    last class; w is 1 for objects, and `no_object` for these. Means over objects of the three terms
    are reported. Carion et al. 2020 divide the first term by the sum of w instead; `class_loss` is
    that quotient. With `every_layer`, training adds the loss of each earlier layer of the decoder.
    """

    no_object: float = 0.1  # weight of the class "no object"
    box: float = 5.0  # weight of the distance of boxes
    overlap: float = 2.0  # weight of their overlap
    every_layer: bool = True  # the heads read each layer of the decoder, not the last one alone

    def __post_init__(self):
        check_numbers("objective.", self, no_object=0, box=0, overlap=0)

    def __call__(self, model: Any, params: Any, batch: dict, context: Any) -> LossSums:
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
        return replace(sums, loss=loss)

    def evaluation(self) -> "SetPrediction":
        return replace(self, every_layer=False)

    def of_predictions(
        self, logits: Float[Array, "B Q C"], boxes: Float[Array, "B Q 4"], batch: dict
    ) -> LossSums:
        """The sums of logits and boxes of all queries."""
        is_object = batch["is_object"]
        of_image = batch["weights"].astype(logits.dtype)[:, None]
        weights = is_object.astype(logits.dtype) * of_image
        queries = match(jax.lax.stop_gradient(self.cost(logits, boxes, batch)), is_object)
        found = jnp.take_along_axis(boxes, queries[..., None], axis=1)
        distance = (jnp.abs(found - batch["boxes"]).sum(axis=-1) * weights).sum()
        lacking = ((1 - generalised_iou(found, batch["boxes"])) * weights).sum()
        B, Q, C = logits.shape
        nothing = jnp.full((B, Q), C - 1)
        # padding is written first to no query: `Q` is out of bounds and dropped
        places = jnp.where(is_object > 0, queries, Q)
        wanted = nothing.at[jnp.arange(B)[:, None], places].set(batch["classes"], mode="drop")
        of_class = jnp.where(wanted == C - 1, self.no_object, 1.0) * of_image
        log_probability = jnp.take_along_axis(
            jax.nn.log_softmax(logits), wanted[..., None], axis=-1
        )[..., 0]
        error = -(of_class * log_probability).sum()
        count = weights.sum()
        metrics = {
            "class_loss": (error, of_class.sum()),
            "box_distance": (distance, count),
            "box_iou_lacking": (lacking, count),
        }
        loss = error + self.box * distance + self.overlap * lacking
        return LossSums(loss, count, metrics, unit="objects")

    def cost(
        self, logits: Float[Array, "B Q C"], boxes: Float[Array, "B Q 4"], batch: dict
    ) -> Float[Array, "B Q M"]:
        """The cost of each query for each object."""
        B, Q, _ = logits.shape
        probability = jax.nn.softmax(logits)
        classes = jnp.broadcast_to(batch["classes"][:, None], (B, Q, batch["classes"].shape[1]))
        of_class = jnp.take_along_axis(probability, classes, axis=2)
        wanted = batch["boxes"][:, None]
        found = boxes[:, :, None]
        distance = jnp.abs(found - wanted).sum(axis=-1)
        return self.box * distance - of_class - self.overlap * generalised_iou(found, wanted)
