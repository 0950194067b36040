"""Whether a folder has a head of its own, or one that is tied to the embedding."""

import re
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from jaxformer import models
from jaxformer.families.family import Family
from jaxformer.models.config import EncoderDecoder, ModelConfig

Config = ModelConfig | EncoderDecoder


def with_stack(config: Config, **changes) -> Config:
    """The config with changed fields of its last stack, which has the heads."""
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=replace(config.decoder, **changes))
    return replace(config, **changes)


def with_tie(file, family: Family, config: Config) -> Config:
    """The config with `tie_embeddings` as the weights have it."""
    # A separate head in the file is used even if config.json ties it (T5 v1.1 of transformers 5).
    # If config.json unties the head and the file has none, a T5 is tied (transformers 5 writes it
    # so), and other models miss a tensor.
    stack = models.last_stack(config)
    heads = (
        rule.theirs
        for rule in family.rules(config)
        if str(rule.ours).endswith("language_model/kernel")
    )
    head = next(heads, None)
    if head is None or not stack.heads:
        return config
    names = names_in_file(file, family, family.aliases.keys() | family.aliases.values())
    if head not in names:
        return with_stack(config, tie_embeddings=True) if family.tied_without_head else config
    first = family.aliases[head]
    tables = [first]
    tables += [alias for alias, name in family.aliases.items() if name == first and alias != head]
    table = next((names[name] for name in tables if name in names), None)
    if not stack.tie_embeddings or table is None:
        return config
    is_tied = np.array_equal(file.read(names[head]), file.read(table))
    return config if is_tied else with_stack(config, tie_embeddings=False)


def names_in_file(file, family: Family, names: Collection[str]) -> dict[str, str]:
    """{name in `names`: name in the file}.

    Old files say gamma and beta for weight and bias, and may leave out the prefix.
    """
    source: dict[str, str] = {}
    for name in file.names:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        canonical = modern if modern in names else family.prefix + modern
        if canonical in names:
            source[canonical] = name
    return source
