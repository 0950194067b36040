"""Sound as Whisper reads it: the logarithm of a mel spectrogram; and sounds with their words."""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from jaxformer.config import new_file, storage
from jaxformer.data.sources import Dataset, Question, cache_folder, read_example
from jaxformer.errors import ConfigError, check_whole

log = logging.getLogger("jaxformer")

RATE = 16_000  # samples a second that Whisper reads
FFT, HOP, BINS = 400, 160, 80  # samples of a frame and between frames (25 ms and 10 ms); mel bins
FLOOR = 1e-10  # the least power before the logarithm
RANGE = 8.0  # powers of ten below the largest power that are kept


@functools.cache
def mel_filters(
    bins: int = BINS, fft: int = FFT, rate: int = RATE
) -> Float[np.ndarray, "frequencies bins"]:
    """Triangles whose corners are equally far apart in mel, from 0 Hz to half the rate.

    A mel is 200 / 3 Hz below 1,000 Hz; above, 27 mels are a factor of 6.4. A triangle of width w Hz
    has height 2 / w, so its area is 1: the filters of Slaney 1998 (Auditory Toolbox). The array is
    read-only. Raises ConfigError if a triangle holds no frequency of the transform.
    """
    check_whole("mel_filters: bins", bins)
    check_whole("mel_filters: fft", fft, 2)
    check_whole("mel_filters: rate", rate)
    frequencies = np.fft.rfftfreq(fft, 1 / rate)
    corners = _hertz(np.linspace(0, _mel(rate / 2), bins + 2))
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    rise = (frequencies[:, None] - left) / (middle - left)
    fall = (right - frequencies[:, None]) / (right - middle)
    filters = np.maximum(0, np.minimum(rise, fall)) * 2 / (right - left)
    if empty := int((filters.max(axis=0) <= 0).sum()):
        raise ConfigError(
            f"mel_filters: bins={bins}, fft={fft}, rate={rate}: {empty} filters lie between two "
            "frequencies of the transform; take fewer bins or a longer frame"
        )
    filters.flags.writeable = False  # the next caller gets the same array
    return filters


def _mel(hertz: float) -> float:
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))


def log_mel(
    wave: Num[np.ndarray, "*samples"],
    bins: int = BINS,
    fft: int = FFT,
    hop: int = HOP,
    rate: int = RATE,
) -> Float[np.ndarray, "frames bins"]:
    """(max(log10 m, max(log10 m) - 8) + 4) / 4 of the mel powers m, each at least 1e-10.

    m = |FFT of a frame under a Hann window|^2 times `mel_filters`. `wave` has values from -1 to 1.
    Frame i is `fft` samples around sample i * hop; the wave is reflected at both ends. There are
    samples // hop frames: 100 a second by default. Computed in float64, returned in float32.
    Whisper pads a wave with zeros to 30 seconds first. Raises ConfigError for integers (divide
    them by their largest value), for a wave that is too short to reflect, or that is not finite.
    Source: Radford et al. 2022, arXiv:2212.04356, section 2.2.
    """
    check_whole("log_mel: hop", hop)
    filters = mel_filters(bins, fft, rate)
    if not np.issubdtype(np.asarray(wave).dtype, np.floating):
        raise ConfigError(
            f"log_mel: a wave of {np.asarray(wave).dtype}: expected floats from -1 to 1; divide "
            "16-bit samples by 32,768"
        )
    samples = np.asarray(wave, np.float64)
    if samples.ndim != 1 or len(samples) <= max(fft // 2, hop - 1):
        raise ConfigError(
            f"log_mel: a wave {list(samples.shape)}: expected one channel of more than "
            f"{max(fft // 2, hop - 1)} samples"
        )
    if not np.isfinite(samples).all():
        raise ConfigError("log_mel: the wave has values that are not finite")
    samples = np.pad(samples, fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(samples, fft)[::hop]
    frames = frames[: len(wave) // hop]  # without the one around the end
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft) / fft)
    power = abs(np.fft.rfft(frames * window)) ** 2
    logarithm = np.log10(np.maximum(power @ filters, FLOOR))
    logarithm = np.maximum(logarithm, logarithm.max() - RANGE)
    return ((logarithm + 4) / 4).astype(np.float32)


def resampled(
    wave: Float[np.ndarray, " samples"], rate: int, new: int = RATE
) -> Float[np.ndarray, " new_samples"]:
    """The wave with `new` samples a second, by a polyphase filter that removes what would alias.

    It has samples * new / rate samples, rounded up. float32.
    """
    from scipy.signal import resample_poly  # half a second to import

    check_whole("resampled: rate", rate)
    check_whole("resampled: new", new)
    divisor = np.gcd(rate, new)
    samples = np.asarray(wave, np.float32)
    return resample_poly(samples, new // divisor, rate // divisor).astype(np.float32)


def fitted(wave: Float[np.ndarray, " samples"], length: int) -> Float[np.ndarray, " length"]:
    """The wave with zeros behind it until it has `length` samples; a longer wave is cut."""
    return np.pad(wave[:length], (0, max(0, length - len(wave))))


@dataclass(frozen=True, eq=False)
class Transcripts:
    """A split of sounds and their words, for an encoder-decoder.

    The decoder reads the tokenizer's `end_of_text`, then the words; it ends with `end_of_text`.
    Raises ConfigError for a text of more than `length` tokens, its end included.
    """

    frames: Float[np.ndarray, "n T C"]
    texts: Sequence[str]  # n
    tokenizer: Any  # with an `end_of_text`
    length: int  # tokens of an example
    __getitem__ = read_example

    def __post_init__(self):
        if len(self.frames) != len(self.texts):
            raise ConfigError(f"data: {len(self.frames)} sounds, {len(self.texts)} texts")
        for text, tokens in zip(self.texts, self._tokens(self.texts), strict=True):
            if len(tokens) > self.length + 1:
                raise ConfigError(
                    f"data: {text!r} has {len(tokens) - 1} tokens with its end; the model has "
                    f"{self.length} positions"
                )

    def __len__(self) -> int:
        return len(self.texts)

    def _tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        end = [self.tokenizer.end_of_text]
        encoded = self.tokenizer.encode_batch(texts)
        return [np.concatenate([end, tokens, end]) for tokens in encoded]

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """source [B, T, C], float32; tokens, labels [B, length], int32; weights, float32."""
        rows = self._tokens([self.texts[i] for i in indices])
        tokens = np.stack([np.pad(row, (0, self.length + 1 - len(row))) for row in rows])
        counts = np.array([[len(row) - 1] for row in rows])  # labels of a row
        return {
            "source": self.frames[indices].astype(np.float32),
            "tokens": tokens[:, :-1].astype(np.int32),
            "labels": tokens[:, 1:].astype(np.int32),
            "weights": (np.arange(self.length)[None] < counts).astype(np.float32),
        }

    @property
    def questions(self) -> list[Question]:
        """Each asks for the words of a sound."""
        pairs = zip(self.frames.astype(np.float32), self.texts, strict=True)
        return [Question([self.tokenizer.end_of_text], text, sound) for sound, text in pairs]


def dataset_of_sounds(
    frames: Float[np.ndarray, "n T C"],
    texts: Sequence[str],
    examples: int,
    tokenizer: Any,
    length: int,
    key: str,
) -> Dataset:
    """Sounds and their words; the first `examples` are the training split, the others validation.

    `key` is all that decides the sounds: a run does not resume on others.
    """
    parts = slice(examples), slice(examples, None)
    train, validation = (
        Transcripts(frames[part], texts[part], tokenizer, length) for part in parts
    )
    digest = hashlib.sha256(f"{key} {examples} {length} {tokenizer.digest}".encode()).hexdigest()
    size = max(tokenizer.vocab_size, tokenizer.end_of_text + 1)
    description = f"{len(train):,} and {len(validation):,} sounds with their words"
    return Dataset(train, validation, digest, description, size, tokenizer)


def kept(key: str, make: Callable[[], np.ndarray], cache: str | None = None) -> np.ndarray:
    """The array that `make` returns, from a file of the cache if the same key made it before.

    `cache` is a folder; None: ~/.cache/jaxformer. A damaged file is made anew. A cache that cannot
    be written gives a warning.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    file = cache_folder(cache) / f"speech-{name}.npy"
    try:
        return storage.retry(lambda: _read(file), file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("data.cache: %s is damaged (%s); it is made anew", file, error)
    array = make()
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)
    try:
        storage.retry(lambda: file.parent.mkdir(parents=True, exist_ok=True), file.parent)
        with new_file(file) as stream:
            np.save(stream, array)
            np.save(stream, digest)
    except OSError as error:
        log.warning("data.cache: sounds are not kept in %s (%s)", file.parent, error)
    return array


def _read(file: Path) -> np.ndarray:
    """The array of a file, whose digest stands behind it. Raises ValueError for another digest."""
    with open(file, "rb") as stream:
        array, digest = np.load(stream), np.load(stream)
    if hashlib.sha256(array.tobytes()).digest() != digest.tobytes():
        raise ValueError("its digest is another")
    return array
