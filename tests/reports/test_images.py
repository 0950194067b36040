"""Images: what users of torchvision, timm, kohya's scripts and others reported about folders, files
and augmentations."""

import struct
import zlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.augment import Crop, Flip, Move, ResizedCrop, augmented
from jaxformer.data.images import Images
from jaxformer.errors import ConfigError
from jaxformer.models import Classification

PIL = pytest.importorskip("PIL.Image")
MODEL = SimpleNamespace(heads=(Classification(3, pooler=None),))


@pytest.fixture
def folder(tmp_path):
    """Two classes with a grey image each, for training and for validation."""
    for part in ("train", "validation"):
        for name, grey in (("cat", 10), ("dog", 200)):
            (tmp_path / part / name).mkdir(parents=True)
            PIL.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / part / name / "0.png")
    return tmp_path


def opened(folder, **more):
    return Images(
        str(folder / "train"), str(folder / "validation"), **{"image": (4, 4)} | more
    ).open(MODEL)


def only(folder, picture, name="0.png", **more):
    """The one picture of class cat as a model sees it, with values from 0 to 255."""
    (folder / "train" / "cat" / "0.png").unlink()
    picture.save(folder / "train" / "cat" / name)
    dataset = opened(folder, values=(0.0, 255.0), **more)
    return np.round(dataset.train.take_rows(np.array([0]))["images"][0]).astype(int)


# --- folders


@pytest.mark.report(
    "pytorch/vision#2831", "open-mmlab/mmpretrain#507", listed="first 11",
    right="Hidden files and folders are no classes and no images.",
    hit=".ipynb_checkpoints was class 0 and moved all others by one.",
)  # fmt: skip
def test_hidden_folders_are_no_classes(folder):
    for part in ("train", "validation"):
        (folder / part / ".ipynb_checkpoints").mkdir()
        PIL.new("RGB", (4, 4)).save(folder / part / ".ipynb_checkpoints" / "0.png")
        (folder / part / "dog" / "._0.png").write_bytes(b"of a Mac")
    dataset = opened(folder)
    for split in (dataset.train, dataset.validation):
        assert split.labels.tolist() == [0, 1]
    assert "left out" not in dataset.description


@pytest.mark.report(
    "pytorch/vision#4925",
    "huggingface/pytorch-image-models#957",
    "pytorch/vision#8297",
    right=(
        "A class folder without an image is refused in training; in validation it moves no other "
        "class."
    ),
    hit="An empty folder of the training data was a class.",
)
def test_an_empty_class_folder_is_named(folder):
    (folder / "validation" / "cat" / "0.png").unlink()
    assert opened(folder).validation.labels.tolist() == [1]
    (folder / "train" / "backup").mkdir()
    (folder / "train" / "backup" / "notes.txt").write_text("none")
    with pytest.raises(ConfigError, match="backup has no image"):
        opened(folder)


@pytest.mark.report(
    "FlyMyAI/flymyai-lora-trainer#72", "ultralytics/ultralytics#25749", "pytorch/vision#446",
    right="Usual kinds of images are read, with endings in capitals too.",
    hit=".webp, .bmp and .gif files were left out in silence.",
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.jpeg", "a.JPG", "a.webp", "a.WEBP", "a.bmp", "a.gif", "a.PNG"])
def test_usual_kinds_of_images_are_read(folder, name):
    pixels = only(folder, PIL.new("RGB", (8, 8), (200, 100, 0)), name)
    assert abs(pixels - [200, 100, 0]).max() <= 6


@pytest.mark.report(
    "vigetlabs/blendid#274",
    right="What is left out, of another kind or in a deeper folder, is counted and said.",
    hit="Nothing said so.",
)  # fmt: skip
def test_what_is_left_out_is_counted(folder):
    (folder / "train" / "cat" / "2024").mkdir()
    PIL.new("RGB", (4, 4)).save(folder / "train" / "cat" / "2024" / "1.png")
    PIL.new("RGB", (4, 4)).save(folder / "train" / "1.png")
    (folder / "train" / "dog" / "scan.tiff").write_bytes(b"none")
    dataset = opened(folder)
    assert len(dataset.train) == 2
    assert f"3 files in {folder}/train left out" in dataset.description


# --- files


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.report(
    "lightly-ai/lightly-studio#1765",
    "d8ahazard/sd_dreambooth_extension#1418",
    listed="first 12",
    right=(
        "The policy for bad rows holds for every error of a file, as that of an image with too "
        "many pixels."
    ),
    hit="Pillow's DecompressionBombError is neither OSError nor ValueError: it ended the run.",
)
def test_an_image_with_too_many_pixels_is_a_bad_row(folder):
    header = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    (folder / "train" / "cat" / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    with pytest.raises(ConfigError, match=r"huge\.png: not readable"):
        opened(folder)
    dataset = opened(folder, bad_rows="skip")
    assert len(dataset.train) == 2 and "1 not readable" in dataset.description


@pytest.mark.report(
    "pytorch/vision#138", "facebookresearch/detectron2#143", "modelscope/ms-swift#3275",
    right="A file that breaks off is refused by its name, or has weight 0.",
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp"])
def test_a_file_that_breaks_off(folder, name):
    file = folder / "train" / "cat" / name
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    PIL.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (folder / "train" / "cat" / "0.png").unlink()
    batch = opened(folder, bad_rows="skip").train.take_rows(np.array([0, 1]))
    assert batch["weights"].tolist() == [0, 1] and not batch["images"][0].any()
    with pytest.raises(ConfigError, match=rf"{name}: not readable"):
        opened(folder).train.take_rows(np.array([0, 1]))


@pytest.mark.report(
    "tensorflow/datasets#590", listed="third 06",
    right="An image is turned upright by what the camera noted.",
)  # fmt: skip
@pytest.mark.report(
    "kohya-ss/sd-scripts#1316", "huggingface/diffusers#3465", "Peterande/D-FINE#308",
    right="An image that was turned by its EXIF data alone is seen as viewers show it.",
)  # fmt: skip
@pytest.mark.parametrize(
    ("orientation", "bright"), [(1, (0, 0)), (3, (-1, -1)), (6, (0, -1)), (8, (-1, 0))]
)
def test_images_are_turned_upright(folder, orientation, bright):
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0, 0] = 255
    exif = PIL.Exif()
    exif[0x0112] = orientation
    (folder / "train" / "cat" / "0.png").unlink()
    PIL.fromarray(pixels).save(folder / "train" / "cat" / "0.png", exif=exif)
    image = opened(folder).train.take_rows(np.array([0]))["images"][0]
    assert image[bright].min() == 1 and image.sum() == 3


def transparent(mode, hidden):
    """A red pixel on what is transparent, whose hidden pixels have some colour."""
    picture = PIL.new("RGBA", (4, 4), (*hidden, 0))
    picture.putpixel((0, 0), (255, 0, 0, 255))
    if mode == "P":
        plain = PIL.new("P", (4, 4), 1)
        plain.putpalette([255, 0, 0, *hidden])
        plain.putpixel((0, 0), 0)
        plain.info["transparency"] = 1
        return plain
    if mode == "RGB":  # one colour is declared to be transparent
        plain = PIL.new("RGB", (4, 4), hidden)
        plain.putpixel((0, 0), (255, 0, 0))
        plain.info["transparency"] = hidden
        return plain
    return picture.convert(mode)


@pytest.mark.report(
    "kohya-ss/sd-scripts#1269", "NVIDIA/DIGITS#85", "meerk40t/meerk40t#962",
    right="What is transparent is white; hidden colours are not seen.",
    hit="Hidden pixels, mostly black, were seen.",
)  # fmt: skip
@pytest.mark.parametrize("hidden", [(0, 0, 0), (9, 200, 30)])
def test_transparent_pixels_are_white(folder, hidden):
    pixels = only(folder, transparent("RGBA", hidden))
    assert pixels[0, 0].tolist() == [255, 0, 0]
    assert (pixels.reshape(-1, 3)[1:] == 255).all()


@pytest.mark.report(
    "StreamController/StreamController#137", "imageio/imageio#475", "python-pillow/Pillow#421",
    right="Transparency of a palette, of grey and in a single channel is transparency, too.",
    hit="It was ignored: the hidden colour of the palette was seen.",
)  # fmt: skip
@pytest.mark.parametrize(
    ("mode", "channels"), [("P", 3), ("P", 1), ("RGB", 3), ("LA", 1), ("RGBA", 1)]
)
def test_every_kind_of_transparency_is_white(folder, mode, channels):
    pixels = only(folder, transparent(mode, (0, 0, 0)), channels=channels)
    assert pixels.shape == (4, 4, channels)
    assert (pixels.reshape(-1, channels)[1:] == 255).all()
    assert pixels[0, 0, -1] in (0, 76)  # red, and red as grey


@pytest.mark.thorough
@pytest.mark.report(
    "PaddlePaddle/PaddleOCR#682",
    right="Height and width are not confused where an image is not square.",
)  # fmt: skip
def test_height_and_width_keep_their_places(folder):
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 4:] = 255
    found = only(folder, PIL.fromarray(pixels), image=(4, 8))
    assert (found == pixels).all()
    images = jnp.asarray(found, jnp.float32)[None]
    for change in (Flip(1.0), Crop(0), Move(0.0, 0.0), ResizedCrop((1.0, 1.0), (1.0, 1.0))):
        assert (
            jax.eval_shape(partial(augmented, [change]), jax.random.key(0), images).shape
            == images.shape
        )
    np.testing.assert_array_equal(
        augmented([Flip(1.0)], jax.random.key(0), images)[0], found[:, ::-1]
    )


# --- augmentations


def cropped_sides(config, count):
    """(heights, widths) of parts of images whose pixels are their own places."""
    place = jnp.stack(jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0), indexing="ij"), axis=-1)
    parts = jax.jit(partial(augmented, [config]))(
        jax.random.key(0), jnp.tile(place[None], (count, 1, 1, 1))
    )
    middle = np.asarray(parts)[:, 28:36, 28:36]
    return 64 * np.mean(np.diff(middle[..., 0], axis=1), axis=(1, 2)), 64 * np.mean(
        np.diff(middle[..., 1], axis=2), axis=(1, 2)
    )


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/vision#618", "pytorch/vision#715", "apache/mxnet#14505",
    right="A crop's ratio of width to height is within its range, never the inverse.",
)  # fmt: skip
def test_a_crop_has_the_ratio_that_was_asked_for():
    heights, widths = cropped_sides(ResizedCrop(area=(0.2, 0.2), ratio=(2.0, 2.0)), 8)
    np.testing.assert_allclose(widths / heights, 2, rtol=1e-3)
    np.testing.assert_allclose(widths * heights, 0.2 * 64**2, rtol=1e-3)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/vision#800",
    right="The logarithm of the ratio is uniform, so that wide crops are as likely as high ones.",
)  # fmt: skip
def test_wide_and_high_crops_are_as_likely():
    heights, widths = cropped_sides(ResizedCrop(area=(0.1, 0.1), ratio=(1 / 4, 4.0)), 400)
    logs = np.sort(np.log(widths / heights) / np.log(4))
    np.testing.assert_allclose(logs, np.linspace(-1, 1, 400), atol=0.15)


@pytest.mark.thorough
@pytest.mark.report(
    "xingyizhou/CenterNet#233", "dbolya/yolact#455", "wolny/pytorch-3dunet#32",
    right="Each image and each step has changes of its own; the same step has the same.",
)  # fmt: skip
def test_each_image_and_step_is_changed_in_its_own_way():
    image = jnp.asarray(np.random.default_rng(0).random((8, 8, 1)), jnp.float32)
    changes = [Crop(3), Flip(), Move(30.0, 2.0)]
    change = jax.jit(partial(augmented, changes))
    first, again, other = (
        change(jax.random.key(seed), jnp.tile(image[None], (6, 1, 1, 1))) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    rows = np.asarray(jnp.concatenate([first, other])).reshape(12, -1)
    assert len(np.unique(rows, axis=0)) == 12


@pytest.mark.report(
    "pytorch/vision#8903",
    "pytorch/vision#8904",
    "pytorch/vision#8944",
    "lightly-ai/lightly-train#959",
    right="an area and a ratio are two positive numbers, the smaller first, and no area is above 1",
    hit=(
        "any tuple was taken: (0.1, 0.2, 0.3), (1, 0), a negative or an infinite one, of which "
        "crops of NaN were made"
    ),
)
@pytest.mark.parametrize("name", ["area", "ratio"])
@pytest.mark.parametrize(
    "pair",
    [
        (0.1, 0.2, 0.3),
        (0.5,),
        (0.9, 0.1),
        (-0.5, 0.5),
        (0.0, 1.0),
        (0.5, float("inf")),
        (float("nan"), 1.0),
    ],
)
def test_a_crop_has_a_range_of_areas_and_ratios(name, pair, as_users_call):
    with pytest.raises(ConfigError, match=rf"ResizedCrop.{name}="):
        ResizedCrop(**{name: pair})
