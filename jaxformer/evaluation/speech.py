"""Speech recognition: the words that a model hears, their error rate, and a method of the 1970s."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

from jaxformer.data.sources import Question
from jaxformer.data.tokenizers import stop_tokens
from jaxformer.decoding import Sampling
from jaxformer.errors import ConfigError, package_of
from jaxformer.evaluation.generation import answers, best_text


def transcribe(
    model: Any, params: Any, frames: Num[np.ndarray, "n T C"], tokenizer: Any, max_tokens: int
) -> list[str]:
    """The text that an encoder-decoder writes for each sound: always the most likely token.

    A text ends at the tokenizer's `end_of_text`, which the decoder also reads first.
    """
    start = [tokenizer.end_of_text]
    questions = [Question(start, "", sound) for sound in np.asarray(frames, np.float32)]
    greedy = Sampling(temperature=0.0)
    ends = stop_tokens(tokenizer)
    found = answers(model, params, questions, tokenizer, max_tokens, greedy, stop_tokens=ends)
    return [best_text(texts).strip() for texts in found]


def word_error_rate(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """`wer`: 100 x (substituted + deleted + inserted words) / words of the references, by jiwer.

    Counts are summed over all texts before the division, so it may exceed 100. Words are separated
    by spaces; upper and lower case differ. Raises ConfigError for no texts, for lists of different
    lengths, for references without a word, and for a missing package.
    """
    with package_of("speech"):
        import jiwer
    hypotheses, references = list(hypotheses), list(references)
    if not references or len(hypotheses) != len(references):
        raise ConfigError(
            f"word_error_rate: {len(hypotheses)} texts and {len(references)} references; "
            "expected as many of both, at least one"
        )
    if not any(reference.split() for reference in references):
        raise ConfigError("word_error_rate: the references have no words")
    return {"wer": 100 * float(jiwer.wer(references, hypotheses))}


def warped_distances(
    frames: Float[np.ndarray, "T C"], others: Float[np.ndarray, "n S C"]
) -> Float[np.ndarray, " n"]:
    """The distance to each of the others by dynamic time warping: Sakoe & Chiba 1978.

    D(t, s) = |x_t - y_s| + min(D(t-1, s), D(t, s-1), D(t-1, s-1)); the result is D(T, S). Nearest
    neighbours by this distance were the recognisers of single words before statistical models.
    """
    squares = (others**2).sum(axis=2)[:, None] + (frames**2).sum(axis=1)[None, :, None]
    products = np.einsum("tc,nsc->nts", frames, others, optimize=True)
    costs = np.sqrt(np.maximum(squares - 2 * products, 0)).transpose(1, 2, 0)
    T, S, n = costs.shape
    before = np.full((S + 1, n), np.inf, costs.dtype)
    before[0] = 0
    for t in range(T):
        row = np.full_like(before, np.inf)
        for s in range(S):
            shortest = np.minimum(np.minimum(before[s], before[s + 1]), row[s])
            row[s + 1] = costs[t, s] + shortest
        before = row
    return before[S]


def nearest_by_warping(
    sounds: Float[np.ndarray, "m T C"], others: Float[np.ndarray, "n T C"], among: int = 200
) -> Int[np.ndarray, " m"]:
    """The index of the nearest of the others to each sound, by `warped_distances`.

    Only `among` others are warped: those at the least Euclidean distance, frame by frame.
    """
    flat = others.reshape(len(others), -1)
    squares = (flat**2).sum(axis=1)
    nearest = np.zeros(len(sounds), np.int64)
    for i, sound in enumerate(sounds):
        first = np.argsort(squares - 2 * flat @ sound.reshape(-1))[:among]
        nearest[i] = first[warped_distances(sound, others[first]).argmin()]
    return nearest
