"""Questions about a picture, answered in words: "which digit is left of the red circle ?" -> seven.

LLaVA: Liu et al. 2023, arXiv:2304.08485. A vision transformer reads the image, a linear map makes
tokens of its patches, and one causal decoder reads them before the text. Each image of 36 x 36
pixels has three digits of scikit-learn and three coloured shapes, in six of nine places. A row of
training has up to eight questions about one image; by its mask, each sees the image and itself.
`exact_match` is the percentage of greedy answers to single questions about 200 unseen images that
equal the true ones; their digits are those that training never shows. `exact_match_words_alone` is
that of the most frequent answer to the question in training. `answers.png` shows some of them.
Expected: exact_match 97.8, 91.6, 92.2 (seeds 0, 1, 2; count, colour, shape 100; digits, all three
right, 96; place 98; beside 96, 79, 80), from the words alone 17.0. 268,224 parameters. Digits
beside shapes are learned last: after 3,200 steps of seed 0 exact_match was 88.8.
Time: 11 minutes of one CPU core.
Needs pip install 'jaxformer[vision,text]'.
Command: make train EXP=vision_language
Then: make generate EXP=vision_language ARGS="--prompt 'how many circles ?'"
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments import _digits_and_shapes as pictures
from jaxformer.data.sources import Question
from jaxformer.data.tokenizers import stop_tokens
from jaxformer.decoding import Sampling
from jaxformer.evaluation.generation import answers, best_text
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import causal, chunked, full, global_tokens
from jaxformer.models import Axial, ModelConfig
from jaxformer.objectives import LossSums, StepContext
from jaxformer.tools.analysis import answered, figures
from jaxformer.training import Cosine, Experiment, Muon, TokenCrossEntropy
from jaxformer.zoo.llava import ImagePrefix

WORDS, patches = pictures.WORDS, pictures.patches


def answer_loss(model: Any, params: Any, batch: dict, context: StepContext) -> LossSums:
    """The cross entropy of the answers, given the image and the text before them."""
    batch = batch | {"inputs": {"images": batch["images"]}}
    return TokenCrossEntropy()(model, params, batch, context)


@dataclass(frozen=True)
class Answers:
    """The scores that the head of this file explains, and those of each kind of question."""

    only_final = True

    def __call__(self, scored: Evaluation) -> dict[str, Any]:
        train, unseen = scored.dataset.train, scored.dataset.validation
        asked = unseen.questions
        written = answers(
            scored.model,
            scored.params,
            asked,
            pictures.TOKENIZER,
            4,
            Sampling(temperature=0.0),
            stop_tokens=stop_tokens(pictures.TOKENIZER),
        )
        found = [best_text(texts).strip() for texts in written]
        truths = [question.reference for question in asked]
        texts = [text for i in range(len(unseen)) for text, _ in unseen.drawn(i).asked]
        if scored.folder is not None and jax.process_index() == 0:
            figures.save(lambda: picture(asked, texts, found), scored.folder / "answers.png")
        return pictures.scores(found, truths, texts, train)


def picture(asked: list[Question], texts: list[str], found: list[str]) -> Any:
    """The first nine images with the questions about them."""
    images, lines = [], []
    for question, text, answer in zip(asked, texts, found, strict=True):
        if not images or (question.source != images[-1]).any():
            images.append(question.source)
            lines.append([])
        lines[-1].append(answered.Answer(text, answer, question.reference))
    return answered.questions(np.stack(images[:9]), lines[:9], columns=3, size=4.2)


vision = ModelConfig(
    vocab_size=0,
    num_layers=3,
    d_model=64,
    num_heads=4,
    context_length=patches.length,
    positions=Axial(patches.grid, (32, 32)),
    d_ff=192,
    embedding=patches,
    masks=(full(),),
    heads=(),
    init_std=0.1,
)
prefix = ImagePrefix(vision, WORDS.index(pictures.IMAGE))
experiment = Experiment(
    name="vision_language",
    model=ModelConfig(
        vocab_size=len(WORDS),
        num_layers=3,
        d_model=64,
        num_heads=4,
        context_length=patches.length + pictures.TURN,
        # a token sees the image and its own question
        masks=(causal() & (global_tokens(patches.length) | chunked(pictures.TURN)),),
        d_ff=192,
        embedding=prefix,
        init_std=0.1,
    ),
    data=pictures.PicturesWithQuestions(),
    objective=answer_loss,
    optimizer=Muon(learning_rate=5e-3, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=4200,
    batch_size=16,
    log_every=100,
    eval_every=2100,
    metrics=(Answers(),),
)
