"""BigBird: BERT with global, neighbouring and random blocks."""

from typing import Any

from jaxformer.families.bert import TASKS, Encoder, encoder
from jaxformer.families.settings import Json, get, only
from jaxformer.zoo.bigbird import BigBird


def _read_bigbird(c: Json, kind: str):
    if c.get("attention_type", "block_sparse") == "original_full":
        return None
    only(c, attention_type="block_sparse")
    block, random = get(c, "block_size", 64), get(c, "num_random_blocks", 3)
    return BigBird(block, random, layout="zero", dense_length=(5 + 2 * random) * block)


def _write_bigbird(config: Any) -> Json:
    mixer = config.mixer
    c = {"rescale_embeddings": config.embedding.scale != 1.0, "use_bias": config.has_bias("query")}
    if mixer is None:
        return c | {"attention_type": "original_full"}
    return c | {
        "attention_type": "block_sparse",
        "block_size": mixer.block,
        "num_random_blocks": mixer.random,
    }


BIGBIRD = Encoder(  # without BigBirdForQuestionAnswering, whose head also reads the tokens
    "BigBird",
    "bert",
    ("Model", *TASKS, "ForPreTraining", "ForCausalLM"),
    pooler=".pooler",
    act="gelu_new",
    classifier_act=None,
    keeps_pooler=True,
    read_mixer=_read_bigbird,
    write_mixer=_write_bigbird,
)
FAMILIES = {"big_bird": encoder(BIGBIRD)}
