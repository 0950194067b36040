"""The sizes that a benchmark and its peers share."""

# layers, width, heads, context, rows, vocabulary; steps that are timed
TRAIN = {
    "small": (4, 128, 4, 64, 12, 65, 40),  # nanoGPT's shakespeare_char in its CPU size
    "large": (6, 384, 6, 256, 16, 65, 5),  # in its GPU size, at a batch that a CPU bears
    "gpt2-256": (12, 768, 12, 256, 4, 50304, 3),  # as experiments/gpt2_small.py has it
    "gpt2-1024": (12, 768, 12, 1024, 1, 50304, 3),
    "quickstart": (4, 128, 4, 128, 16, 256, 40),
}
MODELS = {"bert": (8, 128), "vit": (8, 197), "t5": (8, 128)}  # rows, tokens
ATTENTION = (1, 4, 64, 256)  # rows, heads, width of a head, window
