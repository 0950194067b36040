"""Which caption belongs to which image? Two towers with a contrastive loss.

They find "three one seven" among a hundred captions. CLIP, Radford et al. 2021, arXiv:2103.00020,
section 2.3. The model is a class of this file, not a ModelConfig. An image is compared with every
caption of the batch, also on a mesh, where the batch is one array over all devices. With
--mesh.backend=pmap or --accumulation the loss would see parts of a batch, so both are refused
(`whole_batch`).
Needs pip install 'jaxformer[vision]'.
Expected: for 97 of 100 unseen images their own caption is the nearest of the 100
(validation_accuracy), and for 98 captions their own image (of_texts); all captions differ; seed 0.
Time: 40 seconds on 2 CPU cores.
Command: make train EXP=retrieve_digits
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import constant

from experiments.caption_digits import WORDS, Rows, with_moved_digits
from jaxformer import models
from jaxformer.data.augment import Move
from jaxformer.data.drawn import dataset_of_drawn
from jaxformer.data.images import Digits
from jaxformer.data.sources import Dataset
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.objectives import LossSums, StepContext
from jaxformer.ops.losses import cross_entropy
from jaxformer.params import Spec
from jaxformer.training import AdamW, Cosine, Experiment


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows of three digits and their captions, in which each word is a token."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, caption = self.rows.row(index)
        tokens = np.array([WORDS.index(word) for word in caption.split()], np.int32)
        return {"images": image, "tokens": tokens, "weights": np.float32(1)}

    @property
    def seed(self) -> int:
        return self.rows.seed


@dataclass(frozen=True)
class PairsOfDigits:
    """Images of three digits and their captions; no two of a thousand captions are the same."""

    examples: int = 50_000  # of the training split
    validation_examples: int = 100  # of the validation split
    seed: int = 0  # of the rows

    def open(self, model: Any) -> Dataset:
        digits = Digits().open(None)
        train = Pairs(Rows(digits.train, self.examples, self.seed))
        validation = Pairs(Rows(digits.validation, self.validation_examples, self.seed + 1))
        description = f"rows of three {digits.description}"
        return dataset_of_drawn(train, validation, f"{digits.digest} {self}", description)


@dataclass(frozen=True)
class TwoTowers:
    """An image and a text as vectors of length 1 in one space.

    `apply` gives (images [B, E], texts [B, E], factor of their products).
    """

    image: ModelConfig
    text: ModelConfig

    def spec(self) -> Any:
        # the logarithm of the factor, as in the paper
        factor = Spec((), (), constant(math.log(1 / 0.07)))
        return {"image": models.spec(self.image), "text": models.spec(self.text), "factor": factor}

    def evaluation(self) -> "TwoTowers":
        return TwoTowers(models.evaluation(self.image), models.evaluation(self.text))

    def apply(self, params, images, tokens, dropout_key, dtype=None):
        image_key, text_key = jax.random.split(dropout_key)
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        image = models.apply(
            self.image, params["image"], images, dropout_key=image_key, dtype=dtype
        )
        text = models.apply(self.text, params["text"], tokens, dropout_key=text_key, dtype=dtype)
        # at most 100, as in the paper: an ever larger factor makes training unstable
        return unit(image.logits), unit(text.logits), jnp.minimum(jnp.exp(params["factor"]), 100.0)


@dataclass(frozen=True)
class Contrastive:
    """The mean of two cross entropies: each image picks its text, and each text its image.

    They choose from the whole batch. Another row with the same caption does not count as a wrong
    answer: the two cannot be told apart.
    """

    move: Move | None = Move(degrees=5.0, pixels=0.5)  # of each digit, in training
    whole_batch = True  # not a field: the loss is not a sum over rows

    def evaluation(self) -> "Contrastive":
        return replace(self, move=None)

    def __call__(
        self, model: TwoTowers, params: Any, batch: dict, context: StepContext
    ) -> LossSums:
        move_key, key = jax.random.split(context.key)
        pixels, weights = batch["images"], batch["weights"]
        pixels = pixels if self.move is None else with_moved_digits(self.move, move_key, pixels)
        images, texts, factor = model.apply(params, pixels, batch["tokens"], key, context.dtype)
        logits = factor * jnp.einsum("ie,te->it", images, texts)
        mine = jnp.arange(len(logits))
        other = mine[:, None] != mine[None]
        same = (batch["tokens"][:, None] == batch["tokens"][None]).all(axis=-1) & other
        # rows of weight 0 are not the answer to any row
        logits = jnp.where((weights[:, None] * weights[None] > 0) & ~same, logits, -1e9)
        of_images = cross_entropy(logits, mine, weights)
        of_texts = cross_entropy(logits.T, mine, weights)
        accuracies = {
            "accuracy": (of_images.correct, of_images.weight),
            "of_texts": (of_texts.correct, of_texts.weight),
        }
        loss = (of_images.loss + of_texts.loss) / 2
        return LossSums(loss, of_images.weight, accuracies, unit="pairs")


patches = Patches(image=(8, 24), patch=(4, 4), channels=1, class_token=False)
image = ModelConfig(
    vocab_size=0,
    num_layers=3,
    d_model=64,
    num_heads=4,
    context_length=patches.length,
    embedding=patches,
    masks=(full(),),
    heads=(Classification(64, pool="mean", pooler=None, bias=False),),
    init_std=0.1,
)
text = ModelConfig(
    vocab_size=len(WORDS),
    num_layers=2,
    d_model=64,
    num_heads=4,
    context_length=3,
    masks=(full(),),
    heads=(Classification(64, pool="mean", pooler=None, bias=False),),
    init_std=0.1,
)

experiment = Experiment(
    name="retrieve_digits",
    model=TwoTowers(image, text),
    data=PairsOfDigits(),
    objective=Contrastive(),
    optimizer=AdamW(learning_rate=2e-3, b2=0.98, not_decayed=r"(bias|scale|factor)$"),
    schedule=Cosine(warmup=100),
    steps=600,
    batch_size=100,
    log_every=100,
    eval_every=200,
)
