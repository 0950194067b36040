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
    steps: int  # that are timed
    parts: int = 1  # micro-batches that are tried beside the whole batch


TRAIN = {
    "small": Shape(4, 128, 4, 64, 12, 65, 40),  # nanoGPT's shakespeare_char in its CPU size
    "large": Shape(6, 384, 6, 256, 16, 65, 5, parts=4),  # in its GPU size, at a batch that a CPU bears
    "gpt2-256": Shape(12, 768, 12, 256, 4, 50304, 3),  # as experiments/gpt2_small.py has it
    "gpt2-1024": Shape(12, 768, 12, 1024, 1, 50304, 3),
    "quickstart": Shape(4, 128, 4, 128, 16, 256, 40),
}
# on a GPU, in bfloat16: GPT-2 small and GPT-3 XL (Brown et al. 2020, table 2.1, with heads of 128 that make up its width)
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
