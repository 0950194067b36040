"""Images: digits, arrays and folders; what is wrong with a row is said with its file, or skipped
and counted."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxformer.data import batching
from jaxformer.data.images import Digits, Images
from jaxformer.errors import ConfigError
from jaxformer.models import Classification

MODEL = SimpleNamespace(heads=(Classification(3, pooler=None),))
TEN = SimpleNamespace(heads=(Classification(10),))
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def paint(folder, count=3, size=(6, 4)):
    """A folder with a folder for each colour, of PNG files of that colour alone; returns its
    path."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, colour).save(folder / name / f"{i}.png")
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return Images(
        train=paint(tmp_path / "train"), validation=paint(tmp_path / "validation", 1), image=(4, 4)
    )


@pytest.mark.thorough
def test_digits_are_split_once_and_for_all():
    dataset, again, other = Digits().open(TEN), Digits().open(None), Digits(seed=1).open(TEN)
    assert (len(dataset.train), len(dataset.validation)) == (1437, 360)
    rows = [split.take_rows(np.arange(len(split))) for split in (dataset.train, dataset.validation)]
    images = np.concatenate([part["images"] for part in rows])
    assert images.shape == (1797, 8, 8, 1) and images.dtype == np.float32
    assert images.min() == 0 and images.max() == 1 and set(np.unique(images * 16)) == set(range(17))
    labels = np.concatenate([part["labels"] for part in rows])
    # the package's
    np.testing.assert_array_equal(
        np.bincount(labels), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    )
    np.testing.assert_array_equal(again.train.labels, dataset.train.labels)
    assert dataset.digest == again.digest != other.digest
    assert (other.train.labels != dataset.train.labels).any()


@pytest.mark.thorough
def test_a_row_is_the_same_alone_and_in_a_batch(folders):
    for split in (Digits().open(TEN).validation, folders.open(MODEL).train):
        batch = batching.take_rows(split, np.array([5, 0, 5]))
        for place, index in enumerate((5, 0, 5)):
            for name, value in split[index].items():
                np.testing.assert_array_equal(value, batch[name][place])
        assert {name: rows.dtype for name, rows in batch.items()} == {
            "images": np.float32, "labels": np.int32, "weights": np.float32,
        }  # fmt: skip


def test_a_folder_has_a_class_for_each_folder(folders):
    dataset = folders.open(MODEL)
    assert (len(dataset.train), len(dataset.validation)) == (9, 3)
    batch = dataset.train.take_rows(np.arange(9))
    np.testing.assert_array_equal(batch["labels"], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    for image, label in zip(batch["images"], batch["labels"], strict=True):
        np.testing.assert_array_equal(
            image, np.broadcast_to(np.float32(list(COLOURS.values())[label]) / 255, (4, 4, 3))
        )
    centred = replace(folders, values=(-1.0, 1.0)).open(MODEL)
    np.testing.assert_allclose(centred.train[0]["images"], 2 * batch["images"][0] - 1)
    grey = replace(folders, channels=1).open(MODEL).train[0]["images"]
    # 0.114 x 255, of blue: ITU-R 601
    np.testing.assert_allclose(grey, np.full((4, 4, 1), 29 / 255), rtol=1e-6)


def test_a_picture_is_scaled_and_its_centre_is_cut_out(folders, tmp_path):
    stripes = np.zeros((8, 24, 3), np.uint8)
    stripes[:, 8:16] = 255  # the centre is white
    Image.fromarray(stripes).save(tmp_path / "train" / "blue" / "0.png")
    np.testing.assert_allclose(folders.open(MODEL).train[0]["images"][:, 1:3], 1)


def test_a_photograph_stands_upright(folders, tmp_path):
    """Right edge white in the file, which says that the camera was held so: the picture has it
    below (EXIF orientation 6)."""
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    turned = Image.Exif()
    turned[0x112] = 6
    Image.fromarray(pixels).save(tmp_path / "train" / "blue" / "0.png", exif=turned)
    Image.fromarray(pixels).save(tmp_path / "train" / "blue" / "1.png", exif=b"Exif\0\0damage")
    found = folders.open(MODEL).train.take_rows(np.arange(2))["images"]
    np.testing.assert_allclose(found[0, :2], 0, atol=0.1)
    np.testing.assert_allclose(found[0, 2:], 1, atol=0.1)
    np.testing.assert_allclose(found[1, :, 2:], 1, atol=0.1)  # as it is in the file


def test_an_array_file_is_read(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 4, 4), np.uint8), np.array([0, 1, 2, 1, 0])
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.savez(tmp_path / "b.npz", images=images[..., None] / 255, labels=labels)
    config = Images(
        train=str(tmp_path / "a.npz"), validation=str(tmp_path / "b.npz"), image=(4, 4), channels=1
    )
    dataset = config.open(MODEL)
    found = dataset.train.take_rows(np.arange(5))
    np.testing.assert_allclose(found["images"], images[..., None] / 255, rtol=1e-6)
    np.testing.assert_allclose(
        dataset.validation.take_rows(np.arange(5))["images"], found["images"], rtol=1e-6
    )
    assert (
        dataset.digest
        == config.open(MODEL).digest
        != replace(config, values=(-1.0, 1.0)).open(MODEL).digest
    )
    assert dataset.description.endswith("5 and 5 images of 4 x 4")


def test_what_is_wrong_with_an_array_is_said(tmp_path):
    images, labels = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 1, 2])
    path = str(tmp_path / "a.npz")
    config = Images(train=path, validation=path, image=(4, 4))
    wrong = [
        (
            {"images": images[:, :2], "labels": labels},
            r"a\.npz: images uint8\[3, 2, 4, 3\] .* expected .*\[3, 4, 4, 3\]",
        ),
        (
            {"images": images.astype(np.int64), "labels": labels},
            r"a\.npz: images int64.* expected bytes, or floats from 0",
        ),
        (
            {"images": images, "labels": labels[:2]},
            r"a\.npz: images uint8\[3, 4, 4, 3\] and labels int64\[2\]",
        ),
        ({"images": images, "labels": labels / 2}, r"a\.npz: .* labels float64"),
        (
            {"images": images + np.float32(2), "labels": labels},
            r"a\.npz: images from 2 to 2; expected bytes, or floats from 0",
        ),
        (
            {"images": images - np.float16(0.5), "labels": labels},
            r"a\.npz: images from -0.5 to -0.5; expected",
        ),
        (
            {"images": images * np.nan, "labels": labels},
            r"a\.npz: images from nan to nan; expected",
        ),
        ({"images": images}, r"cannot read .*a\.npz .*labels"),
        (
            {"images": np.array([images[0], images[0, :2]], object), "labels": labels[:2]},
            r"cannot read .*a\.npz",
        ),
        (
            {"images": images, "labels": np.array([0, 3, -1])},
            r"a\.npz: image 1: of no class .*label 3; .* 3 classes",
        ),
    ]
    for arrays, message in wrong:
        np.savez(path, **arrays)
        with pytest.raises(ConfigError, match=message):
            config.open(MODEL)
    dataset = replace(config, bad_rows="skip").open(MODEL)
    assert len(dataset.train) == 1
    assert "4 rows skipped: 4 of no class of the model (first" in dataset.description
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.npz"):
        config.open(MODEL)


def test_what_is_wrong_with_a_folder_is_said(folders, tmp_path):
    train = tmp_path / "train"
    (train / "green" / "1.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"green/1\.png: not readable"):
        folders.open(MODEL)
    (train / "violet").mkdir()
    Image.new("RGB", (4, 4)).save(train / "violet" / "0.png")
    skip = replace(folders, bad_rows="skip")
    dataset = skip.open(MODEL)  # violet is the fourth of three classes
    assert len(dataset.train) == 8
    assert "2 rows skipped: 1 of no class of the model (first" in dataset.description
    assert "1 not readable (first" in dataset.description and "\n" not in dataset.description
    for path in (str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(ConfigError, match=r"no folder .*nowhere|has no image"):
            replace(skip, train=path, validation=path).open(None)


@pytest.mark.parametrize("channels", [2, 4])
def test_files_have_one_or_three_channels(folders, channels):
    """Under "skip" every file was not readable, and training saw black images of weight 0."""
    with pytest.raises(
        ConfigError, match=rf"data\.channels={channels}: files are read as grey \(1\) or as red"
    ):
        replace(folders, channels=channels, bad_rows="skip").open(MODEL)


def test_grey_of_16_bits_is_refused_and_not_white(folders, tmp_path):
    Image.fromarray(np.full((4, 4), 12_000, np.uint16)).save(tmp_path / "train" / "green" / "1.png")
    with pytest.raises(
        ConfigError, match=r"green/1\.png: not readable \(mode I.*: expected 8 bits a channel"
    ):
        folders.open(MODEL)
    assert len(replace(folders, bad_rows="skip").open(MODEL).train) == 8


def test_a_file_that_is_damaged_further_on_is_refused_or_has_no_weight(folders, tmp_path, caplog):
    path = tmp_path / "train" / "red" / "2.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConfigError, match=r"red/2\.png: not readable"):
        folders.open(MODEL).train[8]
    train = replace(folders, bad_rows="skip").open(MODEL).train
    for _ in range(2):  # it is counted once
        batch = train.take_rows(np.array([7, 8]))
        np.testing.assert_array_equal(batch["weights"], [1, 0])
        np.testing.assert_array_equal(batch["images"][1], 0)
    (warning,) = caplog.messages
    assert "red/2.png: not readable" in warning and "1 files so far" in warning


def test_impossible_settings_are_one_line():
    with pytest.raises(ConfigError, match=r"validation_examples=1797: must be from 1 to 1796"):
        Digits(validation_examples=1797).open(TEN)
    with pytest.raises(ConfigError, match=r"scikit-learn: image \d+: of no class .* 3 classes"):
        Digits().open(MODEL)
