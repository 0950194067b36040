"""Whether a folder has a head of its own, or one that is tied to the embedding."""

import logging
import re
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from jaxformer import models
from jaxformer.families.family import Family
from jaxformer.models.config import EncoderDecoder, LanguageModel, ModelConfig

Config = ModelConfig | EncoderDecoder
log = logging.getLogger("jaxformer")


def with_stack(config: Config, **changes) -> Config:
    """The config with changed fields of its last stack, which has the heads."""
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=replace(config.decoder, **changes))
    return replace(config, **changes)


def with_tie(file, family: Family, config: Config) -> Config:
    """The config with `tie_embeddings` as the weights have it."""
    # A separate head in the file is used even if config.json ties it (T5 v1.1 of transformers 5).
    # If config.json unties the head and the file has none, a T5 is tied (transformers 5 writes it
    # so). Other models miss a tensor, unless config.json does not say whether the head is tied.
    stack = models.last_stack(config)
    heads = (
        rule.theirs
        for rule in family.rules(config)
        if str(rule.ours).endswith("language_model/kernel")
    )
    head = next(heads, None)
    if head not in family.aliases or not stack.heads:  # a Reformer's head is never tied
        return config
    names = names_in_file(file, family, family.aliases.keys() | family.aliases.values())
    if head not in names:
        if family.tied_without_head:
            return with_stack(config, tie_embeddings=True)
        has_logits = any(isinstance(each, LanguageModel) for each in stack.heads)
        says_nothing = file.config.get("tie_word_embeddings") is None
        if has_logits and says_nothing and not stack.tie_embeddings:
            log.warning(
                "%s: config.json does not say tie_word_embeddings, and there is no head; "
                "the embedding's table is taken",
                file.folder,
            )
            return with_stack(config, tie_embeddings=True)
        return config
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

    Old files say gamma and beta for weight and bias, or have names of `family.renamed`. Files may
    leave out the prefix, or have it twice.
    """
    source: dict[str, str] = {}
    for name in file.names:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        for pattern, ours in family.renamed.items():
            modern = re.sub(pattern, ours, modern)
        for canonical in (modern, family.prefix + modern, modern.removeprefix(family.prefix)):
            if canonical in names:
                source[canonical] = name
                break
    return source
