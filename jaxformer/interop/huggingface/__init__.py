"""Hugging Face checkpoints as values.

    checkpoint = huggingface.load("path/to/checkpoint")         # or a hub name, "gpt2"
    models.apply(checkpoint.config, checkpoint.params, tokens, segment_ids=attention_mask)
    huggingface.save("out/", checkpoint)                        # transformers opens it

With `segment_ids`, positions count the tokens alone. In transformers only those of RoBERTa and Longformer do: where padding
comes first, `positions=jnp.arange(T)[None]` gives the numbers of the others.

`folder` reads and writes a checkpoint. `encoders`, `decoders` and `pairs` map the weights of each family to ours with the
rules of `tables`. `interop.safetensors` reads and writes the files.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.interop.huggingface.checkpoint import Checkpoint, Tokens
from jaxformer.interop.huggingface.folder import FAMILIES, load, save
