"""Hugging Face checkpoints as values.

    checkpoint = huggingface.load("path/to/checkpoint")         # or a hub name, "gpt2"
    models.apply(checkpoint.config, checkpoint.params, tokens)
    checkpoint.apply(input_ids=tokens, attention_mask=mask)     # the arguments of transformers
    huggingface.save("out/", checkpoint)                        # transformers opens it

`folder` reads and writes a checkpoint. `encoders`, `decoders` and `pairs` map the weights of each family to ours with the
rules of `tables`. `interop.safetensors` reads and writes the files.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.interop.huggingface.checkpoint import Checkpoint, Tokens
from jaxformer.interop.huggingface.folder import FAMILIES, load, save
from jaxformer.interop.huggingface.tables import Conventions
