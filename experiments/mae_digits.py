"""Digits without labels: an encoder that sees a quarter of an image, a decoder that draws the rest.

A masked autoencoder (He et al. 2021, arXiv:2111.06377) on scikit-learn's digits, in patches of
2 x 2 pixels; the encoder sees four of sixteen. `linear_probe` is the share of unseen digits whose
class a linear classifier reads off the frozen encoder: the states of all patches, side by side; the
encoder sees every patch then. `linear_probe_untrained` reads it off the same encoder before its
first step, and `linear_probe_of_pixels` off the pixels. `linear_probe_of_mean` has only the mean of
the states. `reconstructions.png` in the run's folder shows unseen digits, what the encoder saw, and
what the decoder drew.
Needs pip install 'jaxformer[vision]'.
Expected: linear_probe 99.4, 98.6, 98.3 % (seeds 0, 1, 2), untrained 98.1, 97.5, 98.6 %, of pixels
97.8 %, of the mean 95.8, 96.9, 95.3 %. With 360 digits a standard error is 0.6 %.
Time: 4 minutes of one CPU core.
Command: make train EXP=mae_digits
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.data.batching import every_row
from jaxformer.data.images import Digits
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.probes import Labelled, linear_probe
from jaxformer.masks import full
from jaxformer.models import ModelConfig, Patches
from jaxformer.params import random_key
from jaxformer.tools.analysis import figures
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.masked_autoencoder import KeptPatches, PixelDecoder, hidden_patches
from jaxformer.zoo.masked_patches import MaskedPatches

PATCHES, SIDE = 16, 8  # patches of an image; its height and width in pixels
SHOWN = 8  # images of the picture


def states(model: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """The encoder's final states [n, 16, D] when it sees every patch."""
    every = replace(model, embedding=replace(model.embedding, ratio=0.0))
    order = np.tile(np.arange(PATCHES, dtype=np.float32), (len(images), 1))

    @jax.jit
    def run(params, images, noise):
        return models.apply(every, params, images, inputs={"noise": noise}).hidden[:, 1:]

    return np.asarray(run(params, jnp.asarray(images), order))


def features(model: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """The states of all patches, side by side."""
    return flat(states(model, params, images))


def mean(model: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """The mean of the states."""
    return states(model, params, images).mean(axis=1)


def probe(scored: Evaluation) -> dict[str, float]:
    """The linear probes that the head of this file explains, and a picture of reconstructions."""
    splits = scored.dataset.train, scored.dataset.validation
    known, unseen = map(every_row, splits)
    model, params = scored.model, scored.params
    untrained = models.init(model, random_key(scored.seed))
    scores = {
        f"linear_probe{ending}": linear_probe(labelled(known, of), labelled(unseen, of))
        for ending, of in (
            ("", partial(features, model, params)),
            ("_of_mean", partial(mean, model, params)),
            ("_untrained", partial(features, model, untrained)),
            ("_of_pixels", flat),
        )
    }
    if scored.folder is not None and jax.process_index() == 0:
        images = unseen["images"][:SHOWN]
        drawn = reconstructed(model, params, images)
        figures.save(lambda: picture(images, *drawn), scored.folder / "reconstructions.png")
    return scores


def labelled(batch: dict[str, np.ndarray], of: Callable[[np.ndarray], np.ndarray]) -> Labelled:
    """Features of the images of a batch, with their classes."""
    return Labelled(of(batch["images"]), batch["labels"])


def flat(images: np.ndarray) -> np.ndarray:
    """Images [n, H, W, C], or states [n, T, D], as vectors."""
    return images.reshape(len(images), -1)


def reconstructed(model: Any, params: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(images with hidden patches in grey, images with those patches drawn by the decoder)."""
    noise = jax.random.uniform(jax.random.key(0), (len(images), PATCHES))
    output = models.apply(model, params, jnp.asarray(images), inputs={"noise": noise})
    hidden = as_images(np.repeat(hidden_patches(noise, model.embedding.kept)[..., None], 4, axis=2))
    drawn = as_images(output.heads["reconstruction"])
    return np.where(hidden > 0, 0.4, images), np.where(hidden > 0, drawn, images)


def as_images(patches: Any) -> np.ndarray:
    """Patches [B, 16, 4] as images [B, 8, 8, 1]."""
    lines = np.asarray(patches).reshape(-1, 4, 4, 2, 2)  # line and column of patches, of pixels
    return lines.transpose(0, 1, 3, 2, 4).reshape(-1, SIDE, SIDE, 1)


def picture(images: np.ndarray, seen: np.ndarray, drawn: np.ndarray) -> Any:
    """A line of images, a line of what the encoder saw, a line of what the decoder drew."""
    names = ("digit", "seen", "drawn")
    titles = [name for name in names for _ in images]
    return figures.images(np.concatenate([images, seen, drawn]), titles, columns=SHOWN)


experiment = Experiment(
    name="mae_digits",
    model=ModelConfig(
        vocab_size=0,
        num_layers=4,
        d_model=64,
        num_heads=4,
        context_length=PATCHES + 1,
        feedforward="gelu",
        embedding=KeptPatches(Patches(image=(SIDE, SIDE), patch=(2, 2), channels=1)),
        positions=None,
        heads=(PixelDecoder(d_model=64, num_layers=2, num_heads=4, d_ff=256),),
        masks=(full(),),
        init_std=0.1,
    ),
    data=Digits(),
    objective=MaskedPatches(),
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=1500,
    batch_size=128,
    log_every=100,
    eval_every=500,
    metrics=(probe,),
)
