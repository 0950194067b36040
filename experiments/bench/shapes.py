"""The sizes that a benchmark and its peers share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """A decoder and its batch."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int
    vocabulary: int
    steps: int  # number of timed steps
    parts: int = 1  # number of micro-batches, timed beside the undivided batch


TRAIN = {
    "small": Shape(4, 128, 4, 64, 12, 65, 40),  # nanoGPT's shakespeare_char in its CPU size
    # in its GPU size, with a batch that a CPU can compute
    "large": Shape(6, 384, 6, 256, 16, 65, 5, parts=4),
    "gpt2-256": Shape(12, 768, 12, 256, 4, 50304, 3),  # as experiments/gpt2_small.py has it
    "gpt2-1024": Shape(12, 768, 12, 1024, 1, 50304, 3),
    "quickstart": Shape(4, 128, 4, 128, 16, 256, 40),
}
# On a GPU, in bfloat16: GPT-2 small and GPT-3 XL (Brown et al. 2020, table 2.1, but with 16 heads
# of 128, so that their widths add up to that of the model).
GPU = {
    "124m-1024": Shape(12, 768, 12, 1024, 32, 50304, 20),
    "124m-2048": Shape(12, 768, 12, 2048, 16, 50304, 20),
    "1.3b-1024": Shape(24, 2048, 16, 1024, 16, 50304, 10),
    "1.3b-2048": Shape(24, 2048, 16, 2048, 8, 50304, 10),
}
MODELS = {"bert": (8, 128), "vit": (8, 197), "t5": (8, 128)}  # rows, tokens
ATTENTION = (1, 4, 64, 256)  # rows, heads, width of a head, window


def find(name: str) -> tuple[Shape, int]:
    """("large/4") -> the shape "large", in 4 micro-batches."""
    name, _, parts = name.partition("/")
    return (TRAIN | GPU)[name], int(parts or 1)
