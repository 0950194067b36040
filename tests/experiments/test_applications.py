"""Applications, a few steps each: a killed run ends with the same bits, eight devices give the same
losses, and every run ends with its scores and its picture."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import detect_digits, diffuse_shapes
from jaxformer import cli
from jaxformer.data.batching import take_rows
from jaxformer.evaluation.detection import Objects, average_precision
from jaxformer.evaluation.samples import nearest
from tests.joints.harness import (
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    run_of,
)

EXPERIMENTS = Path(diffuse_shapes.__file__).parent
SMALL = "--steps=8 --batch-size=8 --schedule.warmup=1 --eval-every=8"
# options of a small run, a score, the picture
APPLICATIONS = {
    "diffuse_shapes": ("--data.examples=64 --data.validation-examples=16", "right", "samples.png"),
    "detect_digits": ("--data.examples=64 --data.validation-examples=16", "AP50", "boxes.png"),
    "answer_about_images": (
        "--data.examples=64 --data.validation-examples=16",
        "relational",
        "answers.png",
    ),
    "vision_language": (
        "--data.examples=64 --data.validation-examples=16",
        "exact_match",
        "answers.png",
    ),
    "dino_digits": ("", "neighbours", "neighbours.png"),
    "forecast": ("", "mase", "forecasts.png"),
    "molecules": ("--data.examples=64 --data.validation-examples=16", "mae_atoms", "logp.png"),
    "protein_contacts": (
        "--data.examples=64 --data.validation-examples=16",
        "precision",
        "contacts.png",
    ),
    "speech_numbers": (
        "--data.examples=64 --data.validation-examples=16",
        "wer",
        "heard.png",
    ),
    "video_motion": ("--data.examples=64 --data.validation-examples=16", "direction", "videos.png"),
    "mae_digits": ("", "linear_probe", "reconstructions.png"),
    "quantise_digits": ("--data.copies=1", "error_k_means", "codes.png"),
    "paint_digits": ("--data.images.copies=1", "right", "samples.png"),
}

# On one device, a batch with its rows in another order changes these eight losses by up to 3e-5,
# and first parameters that differ by 1e-6 change them by up to 2e-3: ReLU, the largest of 3 x 3
# pixels, and the matching have kinks. Eight devices, each with one row, change them by 6e-5.
TOLERANCE = {"detect_digits": 1e-4}


@pytest.mark.thorough
@pytest.mark.parametrize("name", APPLICATIONS)
def test_it_survives_a_kill_and_runs_on_eight_devices(name, tmp_path):
    options, score, picture = APPLICATIONS[name]
    text = (EXPERIMENTS / f"{name}.py").read_text(encoding="utf-8")
    if name == "diffuse_shapes":
        text = text.replace("AsAsked()", "AsAsked(each=1, new=200)")
    files = {name: text}
    options = [*SMALL.split(), *options.split()]
    if name == "paint_digits":
        options.append(f"--data.quantiser={small_quantiser(tmp_path)}")
    whole = assert_resumes_to_the_same_bits(files, tmp_path, *options)
    rtol = TOLERANCE.get(name, 1e-5)
    assert_same_on_eight_devices(files, tmp_path, *options, whole=whole, rtol=rtol)
    run = run_of(whole, name)
    assert score in json.loads((run / "result.json").read_text())["validation"]
    assert (run / picture).stat().st_size > 5000
    with contextlib.chdir(whole):
        assert cli.main(["evaluate", name]) == 0


def small_quantiser(folder):
    """The folder of a short run of quantise_digits."""
    runs = folder / "quantiser"
    options = [*SMALL.split(), "--data.copies=1", "--metrics=()"]
    assert cli.main(["train", "quantise_digits", "--runs", str(runs), *options]) == 0
    (run,) = runs.glob("quantise_digits-*")
    return run


@pytest.mark.thorough
def test_digits_are_painted_on_request(tmp_path, capsys):
    options = [
        *SMALL.split(),
        "--data.images.copies=1",
        "--metrics=()",
        "--steps=2",
        "--eval-every=2",
    ]
    paint = ["train", "paint_digits", "--runs", str(tmp_path), *options]
    assert cli.main([*paint, f"--data.quantiser={tmp_path / 'none'}"]) == 2
    assert "first run make train EXP=quantise_digits" in capsys.readouterr().err
    assert cli.main([*paint, f"--data.quantiser={small_quantiser(tmp_path)}"]) == 0
    (run,) = tmp_path.glob("paint_digits-*")
    assert cli.main(["generate", str(run), "--prompt", "seven"]) == 0
    assert (run / "samples.png").exists() and "samples.png" in capsys.readouterr().out
    assert cli.main(["generate", str(run), "--prompt", "ten"]) == 2
    assert "expected one of zero" in capsys.readouterr().err


@pytest.mark.thorough
def test_shapes_are_drawn_on_request(tmp_path, capsys):
    options = [
        *SMALL.split(),
        "--data.examples=16",
        "--data.validation-examples=8",
        "--steps=2",
        "--metrics=()",
    ]
    assert cli.main(["train", "diffuse_shapes", "--runs", str(tmp_path), *options]) == 0
    (run,) = tmp_path.glob("diffuse_shapes-*")
    assert not (run / "samples.png").exists()
    assert cli.main(["generate", str(run), "--prompt", "red ring"]) == 0
    assert (run / "samples.png").exists() and "samples.png" in capsys.readouterr().out
    assert cli.main(["generate", str(run), "--prompt", "a red ring"]) == 2
    assert "expected one of red circle" in capsys.readouterr().err


def test_a_drawn_shape_is_nearest_to_its_kind():
    """What reads shape and colour off a sample is right for nearly all unseen images."""
    unseen, labels = diffuse_shapes.draw((0, 1), 200)
    new, new_labels = diffuse_shapes.draw((0, 2), 5000)
    index, distance = nearest(unseen, new)
    assert (new_labels[index] == labels).all(axis=1).mean() > 0.97
    every = np.linalg.norm((unseen[:5, None] - new[None]).reshape(5, len(new), -1), axis=2)
    # squares in float32, of differences of sums near 100
    np.testing.assert_allclose(distance[:5], every.min(axis=1), atol=0.02)
    assert unseen.min() >= 0 and unseen.max() <= 1


def test_the_boxes_of_scenes_hold_their_digits():
    dataset = detect_digits.ScenesOfDigits(examples=40).open(None)
    split = dataset.train
    batch = take_rows(split, np.arange(40))
    counts = batch["is_object"].sum(axis=1)
    assert set(counts.tolist()) == {1, 2, 3, 4}
    for image, boxes, is_object in zip(
        batch["images"], batch["boxes"], batch["is_object"], strict=True
    ):
        rest = image[:, :, 0].copy()
        for x, y, width, height in 64 * boxes[is_object > 0]:
            place = tuple(
                slice(round(middle - size / 2), round(middle + size / 2))
                for middle, size in ((y, height), (x, width))
            )
            assert rest[place].max() > 0.5
            rest[place] = 0
        assert rest.max() <= 0.2  # no ink outside of the boxes
    again = detect_digits.ScenesOfDigits(examples=3).open(None).train
    assert (again[1]["images"] == split[1]["images"]).all()
    assert (dataset.validation[1]["images"] != split[1]["images"]).any()


def test_a_detector_that_answers_all_eight_times_is_scored():
    """Doubled answers cost precision where they are as sure."""
    truth = [Objects(np.array([1, 2]), np.array([[0.2, 0.2, 0.2, 0.2], [0.7, 0.7, 0.2, 0.3]]))]
    doubled = Objects(np.tile([1, 2], 4), np.tile(truth[0].boxes, (4, 1)), np.linspace(1, 0.3, 8))
    assert average_precision([doubled], truth)["AP50"] == pytest.approx(1.0)
