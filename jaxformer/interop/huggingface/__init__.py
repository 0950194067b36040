"""Hugging Face checkpoints as values.

    checkpoint = huggingface.load("path/to/checkpoint")         # or a hub name, "gpt2"
    models.apply(checkpoint.config, checkpoint.params, tokens, segment_ids=attention_mask)
    generate(checkpoint.config, checkpoint.params, prompts, 50, **checkpoint.decoding())  # its stop and banned tokens
    huggingface.save("out/", checkpoint)                        # transformers opens it

With `segment_ids`, positions count the tokens alone. In transformers only those of RoBERTa and Longformer do: where padding
comes first, `positions=jnp.arange(T)[None]` gives the numbers of the others.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.interop.huggingface.folder import (
    FAMILIES,
    Checkpoint,
    Tokens,
    differences,
    load,
    read_config,
    save,
    token_filters,
)
