"""Images with class labels: scikit-learn's digits, arrays in a .npz file, or folders of files."""

import contextlib
import hashlib
import itertools
import logging
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import regular_file
from jaxformer.data.records import Policy, Problems, has_ending, paths_as_text
from jaxformer.data.sources import Dataset, read_example
from jaxformer.errors import ConfigError, package_of

log = logging.getLogger("jaxformer")
# of the labels of `Digits`
DIGIT_NAMES = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"
# endings of image files, in any case; of a .gif the first picture is read
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images. `read(indices)` gives (images `[B, H, W, C]`, weights `[B]`)."""

    labels: np.ndarray
    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    __getitem__ = read_example

    def __len__(self) -> int:
        return len(self.labels)

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The images at `indices` and their weights, float32, and labels `[B]`, int32."""
        images, weights = self.read(indices)
        return {
            "images": images,
            "labels": self.labels[indices].astype(np.int32),
            "weights": weights.astype(np.float32),
        }


@dataclass(frozen=True)
class Digits:
    """The 1,797 handwritten digits of scikit-learn: 8 x 8 grey pixels from 0 to 1."""

    validation_examples: int = 360  # of the validation split
    seed: int = 0  # of the random choice of validation examples

    def open(self, model: Any) -> Dataset:
        with package_of("vision"):
            from sklearn.datasets import load_digits
        pixels, labels = map(np.asarray, load_digits(return_X_y=True))
        if not 0 < self.validation_examples < len(labels):
            raise ConfigError(
                f"data.validation_examples={self.validation_examples}: "
                f"must be from 1 to {len(labels) - 1}"
            )
        _check_labels(model, labels, "digits of scikit-learn: image {}".format, Problems())
        images = (pixels / 16).reshape(-1, 8, 8, 1)
        order = np.random.default_rng(self.seed).permutation(len(labels))
        train, validation = (
            Split(labels[selection], partial(_scale, images[selection], (0.0, 1.0)))
            for selection in (order[self.validation_examples :], order[: self.validation_examples])
        )
        digest = hashlib.sha256()
        for content in (images.tobytes(), labels.tobytes(), order.tobytes()):
            digest.update(content)
        digest.update(bytes(len(validation)))
        description = f"digits of scikit-learn: {len(train):,} and {len(validation):,} images"
        return Dataset(train, validation, digest.hexdigest(), description)


@dataclass(frozen=True)
class Images:
    """Images of your own, from a .npz file or from a folder with one folder for each class.

    A .npz file has `images` `[n, H, W, C]` (bytes, or numbers from 0 to 1) and `labels` `[n]`.

    Class folders are numbered in the order of their names in the training folder. Hidden files and
    folders (.ipynb_checkpoints) are ignored. Files of other kinds are left out, and the description
    counts them. Files are read in threads when a batch needs them. Transparent pixels become white;
    the image is turned upright (EXIF), scaled until it covers `image`, and cut at the centre. If a
    file turns out to be damaged then, `bad_rows="skip"` makes it a black image of weight 0, and a
    warning counts it.
    """

    train: str  # a .npz file, or a folder
    validation: str  # the same
    image: tuple[int, int] = (224, 224)  # height and width in pixels
    channels: int = 3  # 3: red, green and blue; 1: grey
    values: tuple[float, float] = (0.0, 1.0)  # the values of black and of white
    bad_rows: Policy = "error"  # files that cannot be read, labels that are not a class

    def __post_init__(self):
        paths_as_text(self, "train", "validation")

    def open(self, model: Any) -> Dataset:
        self = replace(
            self,
            train=os.path.expanduser(self.train),
            validation=os.path.expanduser(self.validation),
        )
        problems = Problems(self.bad_rows)
        splits = []
        digest = hashlib.sha256(repr((self.image, self.channels, self.values)).encode())
        for path in (self.train, self.validation):
            open_split = _open_array if has_ending(path, ".npz") else _open_folder
            split, content = open_split(self, path, model, problems)
            if not len(split):
                kinds = " ".join(ENDINGS)
                problem = f"{path} has no image{problems}{_left_out(path)}"
                raise ConfigError(
                    f"data: {problem}; expected a folder of images ({kinds}) for each class"
                )
            splits.append(split)
            digest.update(content)
        train, validation = splits
        left_out = "".join(map(_left_out, (self.train, self.validation)))
        sizes = (
            f"{len(train):,} and {len(validation):,} images of {self.image[0]} x {self.image[1]}"
        )
        return Dataset(
            train,
            validation,
            digest.hexdigest(),
            f"{self.train} and {self.validation}: {sizes}{problems}{left_out}",
        )


def _open_array(config: Images, path: str, model: Any, problems: Problems) -> tuple[Split, bytes]:
    """(the split of a .npz file, the digest of its arrays)."""
    regular_file(path)
    try:
        # ZipFile refuses a file that is not a zip file; NumPy would say that it is pickled
        with zipfile.ZipFile(path), np.load(path) as file:
            images = file["images"]
            labels = file["labels"]
    except Exception as error:  # a damaged zip file can make its reader raise anything
        raise ConfigError(
            f"data: cannot read {path} ({error}); expected a .npz file with `images` and `labels`"
        ) from None
    images = images[..., None] if images.ndim == 3 else images
    expected = (labels.size, *config.image, config.channels)
    has_types = images.dtype == np.uint8 or images.dtype.kind in "fb"
    has_types = has_types and labels.dtype.kind in "iu"
    if images.shape != expected or labels.ndim != 1 or not has_types:
        arrays = (
            f"images {images.dtype}{list(images.shape)} and "
            f"labels {labels.dtype}{list(labels.shape)}"
        )
        advice = (
            f"expected bytes, or floats from 0 to 1, {list(expected)} "
            "(data.image, data.channels) and integers [n]"
        )
        raise ConfigError(f"data: {path}: {arrays}; {advice}")
    # `not (...)`, so that NaN is refused, too
    if images.dtype.kind == "f" and not (images.min(initial=0) >= 0 and images.max(initial=0) <= 1):
        limits = f"images from {images.min():g} to {images.max():g}"
        raise ConfigError(f"data: {path}: {limits}; expected bytes, or floats from 0 to 1")
    is_class = _check_labels(model, labels, lambda index: f"{path}: image {index}", problems)
    content = hashlib.sha256(images.tobytes() + labels.tobytes()).digest()
    return Split(labels[is_class], partial(_scale, images[is_class], config.values)), content


def _open_folder(config: Images, path: str, model: Any, problems: Problems) -> tuple[Split, bytes]:
    """(the split of a folder, its content: the names and sizes of its files)."""
    with package_of("vision"):
        import PIL.Image  # noqa: F401  (a missing package is reported before the files are listed)
    if config.channels not in (1, 3):
        raise ConfigError(
            f"data.channels={config.channels}: "
            "files are read as grey (1) or as red, green and blue (3)"
        )
    for folder in (config.train, path):
        if not Path(folder).is_dir():
            raise ConfigError(
                f"data: there is no folder {folder}; "
                "expected one with a folder of images for each class, or a .npz"
            )
    number = {name: i for i, name in enumerate(_class_names(config.train))}
    files = [file for file in _visible(path) if file.suffix.lower() in ENDINGS]
    labels = np.array([number.get(file.parent.name, -1) for file in files], np.int32)
    is_class = _check_labels(model, labels, lambda index: str(files[index]), problems)
    with ThreadPoolExecutor() as pool:
        for index, problem in enumerate(pool.map(_problem, files)):
            if problem:
                problems.add(str(files[index]), "not readable", problem)
                is_class[index] = False
    sizes = [file.stat().st_size if file.is_file() else "no file" for file in files]
    content = "".join(
        f"{file.relative_to(path)} {size}\n" for file, size in zip(files, sizes, strict=True)
    ).encode()
    files = list(itertools.compress(files, is_class))
    return Split(labels[is_class], partial(_read_files, config, files, set())), content


def _problem(file: Path) -> str | None:
    """Why a file of an image cannot be read, in words; None if it can.

    It reads only the first bytes: decoding a million files would take an hour.
    """
    from PIL import Image

    try:
        regular_file(file)
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # PIL would clip it to white
                return f" (mode {image.mode}: expected 8 bits a channel)"
    except Exception as error:  # Pillow's own classes, and those of its format readers
        return f" ({error})"
    return None


def _visible(folder: str) -> list[Path]:
    """The sorted files in the class folders of a folder, with pipes and broken links.

    Hidden ones are left out.
    """
    return sorted(
        file
        for file in Path(folder).glob("*/*")
        if not file.is_dir() and not _is_hidden(file, folder)
    )


def _is_hidden(path: Path, folder: str) -> bool:
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def _class_names(folder: str) -> list[str]:
    """The sorted names of the class folders.

    Raises ConfigError for one without an image: it would shift the numbers of the classes after it.
    """
    names = sorted(
        each.name
        for each in Path(folder).iterdir()
        if each.is_dir() and not each.name.startswith(".")
    )
    filled = {file.parent.name for file in _visible(folder) if file.suffix.lower() in ENDINGS}
    if filled and (empty := [name for name in names if name not in filled]):
        kinds = " ".join(ENDINGS)
        advice = f"expected files {kinds} in each folder of a class; remove or fill it"
        raise ConfigError(f"data: {Path(folder) / empty[0]} has no image; {advice}")
    return names


def _left_out(folder: str) -> str:
    """Text that counts the files of an image folder that are not read; empty if there are none."""
    if not Path(folder).is_dir():
        return ""
    read = {file for file in _visible(folder) if file.suffix.lower() in ENDINGS}
    files = (
        file
        for file in sorted(Path(folder).rglob("*"))
        if file.is_file() and not _is_hidden(file, folder)
    )
    # files of another kind, or not directly in a class folder
    others = [file for file in files if file not in read]
    return f"; {len(others):,} files in {folder} left out (first {others[0]})" if others else ""


def _check_labels(
    model: Any, labels: np.ndarray, place: Callable[[int], str], problems: Problems
) -> np.ndarray:
    """Whether each label is a class of the model's first head; the other labels are problems.

    If the head has no classes, every label of at least 0 is one.
    """
    classes = getattr(next(iter(getattr(model, "heads", ())), None), "classes", None) or np.inf
    is_class = (labels >= 0) & (labels < classes)
    for index in np.flatnonzero(~is_class):
        problems.add(
            place(int(index)),
            "of no class of the model",
            f" (label {labels[index]}; model.heads has {classes} classes)",
        )
    return is_class


def _scale(
    images: np.ndarray, values: tuple[float, float], indices: Any = ...
) -> tuple[np.ndarray, np.ndarray]:
    """(images scaled from bytes, or from [0, 1], to `values`; weights of 1)."""
    batch = images[indices]
    low, high = values
    share = (high - low) / (255 if batch.dtype == np.uint8 else 1)
    return batch.astype(np.float32) * np.float32(share) + np.float32(low), np.ones(len(batch))


def _on_white(image: Any) -> Any:
    """The picture on white instead of transparency.

    Transparent pixels have any colour, often black; a mere conversion by Pillow would show it.
    """
    if not image.has_transparency_data:
        return image
    from PIL import Image

    picture = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _read_files(
    config: Images, files: list[Path], bad: set[Path], indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(images of files, weights: 0 for a file that cannot be decoded).

    `bad` collects such files, so that each is logged once.
    """
    with ThreadPoolExecutor() as pool:
        images, weights = zip(
            *pool.map(partial(_decode, config, bad), [files[index] for index in indices.tolist()]),
            strict=True,
        )
    return _scale(np.stack(images), config.values)[0], np.array(weights)


def _decode(config: Images, bad: set[Path], file: Path) -> tuple[np.ndarray, float]:
    """(image of a file in bytes, weight).

    A file that cannot be decoded raises ConfigError, or has weight 0 if `bad_rows` is "skip".
    """
    from PIL import Image, ImageOps

    shape = (*config.image, config.channels)
    try:
        with Image.open(file) as image:
            picture = _on_white(image).convert("L" if config.channels == 1 else "RGB")
        # the EXIF data may be damaged although the picture is not
        with contextlib.suppress(Exception):
            picture = ImageOps.exif_transpose(picture)
        return np.asarray(ImageOps.fit(picture, config.image[::-1])).reshape(shape), 1.0
    except Exception as error:  # Pillow's own classes, and those of its format readers
        Problems(config.bad_rows).add(str(file), "not readable", f" ({error})")
        if file not in bad:
            bad.add(file)
            log.warning(
                "data: %s: not readable (%s); skipped, with it %d files so far",
                file,
                error,
                len(bad),
            )
        return np.zeros(shape, np.uint8), 0.0
