"""The classes of transformers, by the end of their names, and the heads that each of them has."""

from collections.abc import Collection

from jaxformer.errors import ConfigError
from jaxformer.families.settings import Json, get
from jaxformer.models.config import Classification, LanguageModel, TokenClassification

# In this file `kinds` are ends of class names, or a dict from these to the heads of the class.

# BERT pools position 0 even if it is padding
POOLED = Classification(None, pool="position_0", name="pooled")
NEXT_SENTENCE = Classification(2, pool="position_0", name="next_sentence")
SPAN = TokenClassification(2, name="span")


def heads_by_class(
    kinds: Collection[str],
    sequence: Classification,
    language_model=LanguageModel(),
    base: tuple = (),
) -> dict[str, tuple]:
    """The heads of each of these classes.

    `sequence` classifies a sequence; `base` are the heads of a bare model.
    """
    heads = {
        "Model": base,
        "ForPreTraining": (language_model, NEXT_SENTENCE),
        "ForNextSentencePrediction": (NEXT_SENTENCE,),
        "ForSequenceClassification": (sequence,),
        "ForQuestionAnswering": (SPAN,),
        "ForMultipleChoice": (Classification(1, pool="position_0", name="multiple_choice"),),
        "ForTokenClassification": (TokenClassification(sequence.classes or 0),),
    }
    return {kind: heads.get(kind, (language_model,)) for kind in kinds}


def class_kind(c: Json, prefix: str, kinds: Collection[str]) -> str:
    """The class that wrote the file, one of `kinds` (default: the first). Raises ConfigError."""
    names = [prefix + kind for kind in kinds]
    architectures = c.get("architectures") or names
    architecture = architectures if isinstance(architectures, str) else architectures[0]
    # the first conversions of LLaMA say LLaMAForCausalLM
    name = next((name for name in names if name.lower() == str(architecture).lower()), None)
    if name is None:
        expected = " or ".join(names)
        raise ConfigError(f"config.json: architecture {architecture!r}; expected {expected}")
    return name.removeprefix(prefix)


def read_heads(c: Json, prefix: str, kinds: dict[str, tuple]) -> tuple:
    """The heads of the class that wrote the file."""
    return kinds[class_kind(c, prefix, kinds)]


def without_absent(heads: tuple, names: Collection[str], module: str) -> tuple:
    """The heads of a bare model; () if the file has no tensor of their `module`, such as a pooler.

    A model with `heads=()` is saved so. No names: there is no file.
    """
    is_absent = names and not any(module in name for name in names)
    return () if is_absent and heads and heads[0].name == "pooled" else heads


def write_heads(heads: tuple, prefix: str, kinds: dict[str, tuple]) -> Json:
    """The class and the labels for config.json.

    Raises ConfigError if no class has heads of these names.
    """

    def names(heads):
        return [head.name for head in heads if head.name != "pooled"]

    kind = next((kind for kind in kinds if names(kinds[kind]) == names(heads)), None)
    if kind is None:
        raise ConfigError(
            f"model.heads={heads}: expected those of a class {prefix}... of transformers: {kinds}"
        )
    classes = next((head.classes for head in heads if head.name.endswith("classification")), 0)
    labels = tuple(f"LABEL_{i}" for i in range(classes))  # the names that transformers gives
    return {"architectures": [prefix + kind]} | write_labels(labels)


def count_labels(c: Json) -> int:
    """The number of classes; 2 if config.json does not say. As in transformers, names go first."""
    return len(c.get("id2label") or ()) or get(c, "num_labels", None) or 2


def write_labels(labels: tuple[str, ...]) -> Json:
    """The entries of config.json for the class names, if any."""
    if not labels:
        return {}
    label2id = {name: i for i, name in enumerate(labels)}
    return {"id2label": dict(enumerate(labels)), "label2id": label2id}


KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
DECODER_TASKS = {
    "classification": "score",
    "token_classification": "classifier",
    "span": "qa_outputs",
}


def heads_of_decoder(c: Json, language_model: str = "ForCausalLM") -> dict[str, tuple]:
    """The heads of the classes of a decoder.

    A sequence is classified by its last token that is not padding.
    """
    sequence = Classification(count_labels(c), pool="last", pooler=None, bias=False)
    return heads_by_class((language_model, *KINDS), sequence)
