"""Images of a shape in a colour, of 16 x 16 pixels: the data of diffuse_shapes."""

import numpy as np

SIZE = 16  # pixels of a side
SHAPES = ("circle", "square", "triangle", "ring")
COLOURS = {
    "red": (1, 0.15, 0.15),
    "green": (0.15, 0.9, 0.2),
    "blue": (0.2, 0.3, 1),
    "yellow": (1, 0.9, 0.1),
    "magenta": (0.9, 0.2, 0.9),
    "cyan": (0.1, 0.9, 0.9),
}
REQUESTS = {
    f"{colour} {shape}": (i, k)
    for i, shape in enumerate(SHAPES)
    for k, colour in enumerate(COLOURS)
}
EVERY = list(REQUESTS.values())


def depth(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """How many pixels a place lies inside of a shape around 0; negative: outside."""
    match shape:
        case "circle":
            return radius - np.hypot(x, y)
        case "square":
            return 0.85 * radius - np.maximum(abs(x), abs(y))
        case "triangle":
            return 0.55 * radius - np.maximum(0.87 * abs(x) - 0.5 * y, y)
    return 0.3 * radius - abs(np.hypot(x, y) - 0.8 * radius)


def draw(seed: tuple[int, int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(images [n, 16, 16, 3] from 0 to 1, labels [n, 2]: shape and colour)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers((len(SHAPES), len(COLOURS)), size=(count, 2), dtype=np.int32)
    radius = rng.uniform(4, 6, (count, 1, 1))
    y, x = rng.uniform(6, SIZE - 7, (2, count, 1, 1))
    y, x = np.arange(SIZE)[None, :, None] - y, np.arange(SIZE)[None, None] - x
    is_shape = [labels[:, :1, None] == i for i in range(len(SHAPES))]
    inside = np.select(is_shape, [depth(shape, x, y, radius) for shape in SHAPES])
    cover = np.clip(inside + 0.5, 0, 1)[..., None]
    colour = np.array(list(COLOURS.values()))[labels[:, 1]] * rng.uniform(0.8, 1, (count, 1))
    ground = rng.uniform(0, 0.3, (count, 1, 1, 1))
    return (ground + cover * (colour[:, None, None] - ground)).astype(np.float32), labels
