"""Longformer: RoBERTa with windows and global tokens."""

import reprlib

from jaxformer.errors import ConfigError
from jaxformer.families.bert import ROBERTA, TASKS, encoder
from jaxformer.families.settings import Json, get, pattern_of, repeated
from jaxformer.zoo.longformer import Longformer


def _read_longformer(c: Json, kind: str):
    layers = get(c, "num_hidden_layers")
    windows = c.get("attention_window", 512)
    windows = windows if isinstance(windows, list) else [windows] * layers
    if len(windows) != layers or any(
        type(width) is not int or width < 2 or width % 2 for width in windows
    ):
        raise ConfigError(
            f"config.json: attention_window={reprlib.repr(windows)}: "
            "expected an even number for each layer"
        )
    # for these classes, each call gives the global tokens
    per_call = kind in ("ForQuestionAnswering", "ForMultipleChoice")
    tokens = None if per_call else int(kind == "ForSequenceClassification")
    return pattern_of([Longformer(width, tokens) for width in windows])


LONGFORMER = ROBERTA._replace(
    name="Longformer",
    base="longformer",
    kinds=("Model", *TASKS, "ForQuestionAnswering"),
    read_mixer=_read_longformer,
    write_mixer=lambda config: {
        "attention_window": [mixer.window for mixer in repeated(config.mixer, config)]
    },
)
FAMILIES = {"longformer": encoder(LONGFORMER)}
