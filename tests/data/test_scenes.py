"""Scenes of coloured shapes: where they stand, and what is drawn."""

import numpy as np
import pytest

from jaxformer.data import scenes
from jaxformer.errors import ConfigError


@pytest.mark.parametrize("seed", range(5))
def test_objects_keep_their_distances(seed):
    centres = scenes.place(np.random.default_rng(seed), 6, 48, 4.5, 9.0)
    distances = np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1))
    assert distances[~np.eye(6, dtype=bool)].min() >= 9
    assert centres.min() >= 4.5 and centres.max() <= 43.5


def test_objects_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="they hardly fit"):
        scenes.place(np.random.default_rng(0), 40, 48, 4.5, 9.0)
    with pytest.raises(ConfigError, match="they hardly fit"):
        scenes.place(np.random.default_rng(0), 1, 8, 4.5, 9.0)


def inside(shape, x, y, radius):
    """Whether a point lies in a shape around 0; y grows downwards."""
    match shape:
        case "square":
            return max(abs(x), abs(y)) < radius
        case "circle":
            return x * x + y * y < radius * radius
    return y < radius and abs(x) < (y + radius) / 2


@pytest.mark.parametrize("kind", range(3))
def test_a_shape_has_its_outline(kind):
    """Beyond half a pixel's diagonal from the edge, a pixel has the colour or none."""
    size, radius = 21, 6.0
    centre, colour = np.array([10.3, 9.6]), np.array([0.2, 0.9, 0.4])
    image = scenes.draw(centre[None, None], np.array([[kind]]), colour[None, None], size, radius)
    for line in range(size):
        for column in range(size):
            x, y = np.array([column, line]) + 0.5 - centre
            near = [
                inside(scenes.SHAPES[kind], x + dx, y + dy, radius)
                for dx in (-1, 0, 1)
                for dy in (-1, 0, 1)
            ]
            if all(near) or not any(near):
                expected = colour * near[0]
                np.testing.assert_allclose(image[0, line, column], expected, atol=1e-6)


def test_a_later_shape_covers_an_earlier_one():
    centres = np.full((1, 2, 2), 8.0)
    colours = np.array([[[1.0, 0, 0], [0, 1.0, 0]]])
    image = scenes.draw(centres, np.array([[0, 1]]), colours, 16, 4.0)[0]
    np.testing.assert_allclose(image[8, 8], [0, 1, 0])
    np.testing.assert_allclose(image[4, 4], [1, 0, 0])  # the corner of the square


def test_a_shape_at_the_edge_is_cut():
    image = scenes.draw(np.array([[[0.0, 16.0]]]), np.array([[0]]), np.ones((1, 1, 3)), 16, 3.0)
    assert image.shape == (1, 16, 16, 3)
    assert image[0, 14, 1].min() == 1 and image[0, :12].max() == 0
