"""Hugging Face checkpoints as values, one file a family.

    checkpoint = families.load("path/to/checkpoint")            # or a hub name, "gpt2"
    models.apply(checkpoint.config, checkpoint.params, tokens, segment_ids=attention_mask)
    options = checkpoint.decoding()                             # its stop and banned tokens
    generate(checkpoint.config, checkpoint.params, prompts, 50, **options)
    families.save("out/", checkpoint)                           # transformers opens it

With `segment_ids`, positions count only tokens, not padding. In transformers, only RoBERTa and
Longformer count so. For the others, when padding comes first, `positions=jnp.arange(T)[None]` gives
the numbers of transformers.

`load(folder, part="vision")` reads one tower of a CLIP or SigLIP, `part="text"` the other.

`peft.load` reads an adapter of PEFT for a checkpoint, and `peft.save` writes one.

`load(folder, family=mine)` takes a `Family` of your own: `family.py` says what it is, `gpt2.py` is
the shortest example.
"""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.families.comparison import differences
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.folder import Checkpoint, load, read_config, save
from jaxformer.families.initial import HuggingFace
from jaxformer.families.known import FAMILIES
from jaxformer.families.tokens import Tokens, token_filters
