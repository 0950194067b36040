"""Average precision beside cases whose result follows from its definition."""

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation.detection import Objects, average_precision


def scenes(count, seed=0):
    """Objects that do not overlap: each lies in a cell of its own of a grid of 3 x 3."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        n = rng.integers(1, 6)
        cells = np.stack(np.divmod(rng.permutation(9)[:n], 3), axis=1)
        size = rng.uniform(0.15, 0.3, (n, 2))
        boxes = np.concatenate([(cells + 0.5) / 3, size], axis=1)
        images.append(Objects(rng.integers(4, size=n), boxes))
    return images


def with_scores(images, scores=1.0):
    return [each._replace(scores=np.full(len(each.classes), scores)) for each in images]


def test_the_truth_is_perfect_and_nothing_is_zero():
    truth = scenes(20)
    assert average_precision(with_scores(truth), truth) == {"mAP": 1.0, "AP50": 1.0}
    nothing = [Objects(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0))] * 20
    assert average_precision(nothing, truth) == {"mAP": 0.0, "AP50": 0.0}
    wrong = [each._replace(classes=each.classes + 4) for each in with_scores(truth)]
    assert average_precision(wrong, truth)["AP50"] == 0.0


@pytest.mark.parametrize(("width", "thresholds"), [(0.92, 9), (0.77, 6), (0.52, 1), (0.48, 0)])
def test_a_narrower_box_counts_up_to_its_overlap(width, thresholds):
    """IoU of a box and its narrower self is the ratio of widths; COCO asks for 0.5 to 0.95."""
    truth = scenes(20)
    found = [each._replace(boxes=each.boxes * [1, 1, width, 1]) for each in with_scores(truth)]
    scores = average_precision(found, truth)
    assert scores["mAP"] == pytest.approx(thresholds / 10)
    assert scores["AP50"] == float(thresholds > 0)


def test_a_false_alarm_costs_only_before_what_is_right():
    """One class, every object found, and as many false alarms with larger or smaller scores."""
    truth = [each._replace(classes=np.zeros_like(each.classes)) for each in scenes(30)]
    for score, expected in ((0.1, 1.0), (2.0, 0.5)):
        found = []
        for each in truth:
            far = each.boxes + np.array([10, 10, 0, 0])
            n = len(far)
            found.append(
                Objects(
                    np.zeros(2 * n, int),
                    np.concatenate([each.boxes, far]),
                    np.repeat([1.0, score], n),
                )
            )
        # precision is interpolated at 101 recalls: the last one decides
        assert average_precision(found, truth)["AP50"] == pytest.approx(expected, abs=0.01)


def test_what_does_not_fit_is_refused():
    truth = scenes(2)
    with pytest.raises(ConfigError, match="1 images with detections, 2 with objects"):
        average_precision(with_scores(truth)[:1], truth)
    with pytest.raises(ConfigError, match="scores"):
        average_precision(truth, truth)
    empty = Objects(np.zeros(0, int), np.zeros((0, 4)))
    with pytest.raises(ConfigError, match="no image has an object"):
        average_precision(with_scores(truth), [empty, empty])
