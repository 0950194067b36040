"""BERT and its relatives: RoBERTa, Longformer, BigBird. And ViT, an encoder of images."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ConfigError
from jaxformer.interop.tables import NAME as ACTIVATION_NAME
from jaxformer.interop.tables import (
    REQUIRED,
    Family,
    Json,
    Rule,
    activation,
    architecture,
    labels,
    modules,
    only,
    read_fields,
    write_fields,
    written_labels,
)
from jaxformer.masks import full
from jaxformer.models import mixers
from jaxformer.models.config import (
    Classification,
    Embedding,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    TokenClassification,
)

POOLED = Classification(None, name="pooled")
FIELDS = {
    "vocab_size": ("vocab_size", REQUIRED), "num_hidden_layers": ("num_layers", REQUIRED),
    "hidden_size": ("d_model", REQUIRED), "num_attention_heads": ("num_heads", REQUIRED),
    "max_position_embeddings": ("context_length", REQUIRED), "intermediate_size": ("d_ff", REQUIRED),
    "hidden_act": ("feedforward", "gelu"), "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout_rate", 0.1), "attention_probs_dropout_prob": ("attention_dropout_rate", 0.1),
    "initializer_range": ("init_std", 0.02), "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip
HEADS = {  # what the class's name ends in -> heads, given the activation and the number of labels
    "Model": lambda act, n: (POOLED,),
    "ForPreTraining": lambda act, n: (LanguageModel(act, bias=True), Classification(2, name="next_sentence")),
    "ForMaskedLM": lambda act, n: (LanguageModel(act, bias=True),),
    "ForNextSentencePrediction": lambda act, n: (Classification(2, name="next_sentence"),),
    "ForSequenceClassification": lambda act, n: (Classification(n),),
    "ForTokenClassification": lambda act, n: (TokenClassification(n),),
    "ForQuestionAnswering": lambda act, n: (TokenClassification(2, name="span"),),
}


def encoder(name: str, model_type: str, base: str, roberta: bool = False) -> Family:
    """The family of classes called `name`...; RoBERTa and Longformer count positions from 2, and their heads differ."""

    def read(c: Json, names: Collection[str]) -> ModelConfig:
        only(c, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False, use_bias=True)
        act = {"hidden_act": ("feedforward", "gelu_new" if name == "BigBird" else "gelu")}
        fields = read_fields(c, FIELDS | act)
        pad = c.get("pad_token_id", 1)
        if roberta and (type(pad) is not int or pad < 0):
            raise ConfigError(f"config.json: pad_token_id={pad!r}: expected a token, behind which positions begin")
        offset = pad + 1 if roberta else 0
        kind = architecture(c, *(name + suffix for suffix in HEADS)).removeprefix(name)
        heads = HEADS[kind]("gelu" if roberta else fields["feedforward"], labels(c))  # RoBERTa's head has its own
        if name == "BigBird" and kind == "ForSequenceClassification":
            heads = (Classification(labels(c), pooler=fields["feedforward"]),)
        if kind == "Model" and names and not any("pooler." in n for n in names):
            heads = ()
        pooled = ("Model", "ForPreTraining", "ForNextSentencePrediction")
        if name == "BigBird" and kind not in pooled and any("pooler." in n for n in names):
            heads = (*heads, POOLED)  # which nothing reads
        scale = c["hidden_size"] ** 0.5 if c.get("rescale_embeddings") else 1.0
        return ModelConfig(
            **fields | {"context_length": fields["context_length"] - offset},
            norm_placement="post",
            positions=Learned(offset),
            masks=(full(),),
            embedding=Embedding(scale, norm=True, token_types=c.get("type_vocab_size", 2)),
            heads=heads,
            mixer=_mixer(name, c),
        )

    def write(config: ModelConfig) -> Json:
        names = [getattr(head, "name", "") for head in config.heads if head != POOLED]
        kinds = {tuple(h.name for h in make("gelu", 2) if h != POOLED): kind for kind, make in HEADS.items()}
        offset = getattr(config.positions, "offset", 0)
        c = write_fields(config, FIELDS) | {
            "architectures": [name + kinds.get(tuple(names), "?")],
            "model_type": model_type,
            "max_position_embeddings": config.context_length + offset,
            "type_vocab_size": getattr(config.embedding, "token_types", 0),
            "pad_token_id": max(offset - 1, 0),
        }
        if isinstance(config.mixer, mixers.Longformer):
            c["attention_window"] = [config.mixer.window] * config.num_layers
        if name == "BigBird":
            c["rescale_embeddings"] = getattr(config.embedding, "scale", 1.0) != 1.0
            c["attention_type"] = "block_sparse" if config.mixer else "original_full"
            if isinstance(config.mixer, mixers.BigBird):
                c |= {"block_size": config.mixer.block, "num_random_blocks": config.mixer.random}
        classes = [head for head in config.heads if getattr(head, "name", "").endswith("classification")]
        return c | written_labels(classes[0] if classes else None)

    pooler = f"{base}.pooler" + ("" if name == "BigBird" else ".dense")
    lm = "lm_head." if roberta else "cls.predictions."
    aliases = {lm + "decoder.weight": f"{base}.embeddings.word_embeddings.weight", lm + "decoder.bias": lm + "bias"}
    rules = _rules(base, roberta, pooler, lm, deep_classifier=roberta or name == "BigBird")
    return Family(read, write, lambda config: rules, prefix=base + ".", aliases=aliases)


def _mixer(name: str, c: Json):
    if name == "Longformer":
        windows = c["attention_window"] if isinstance(c["attention_window"], list) else [c["attention_window"]]
        if not windows or any(type(width) is not int or width < 2 or width % 2 for width in windows):
            raise ConfigError(f"config.json: attention_window={windows}: expected an even number, one for each layer")
        if len(set(windows)) > 1:
            raise ConfigError(f"config.json: attention_window={windows} differs between layers, which is not supported")
        return mixers.Longformer(windows[0], global_tokens=0)
    if name == "BigBird" and c.get("attention_type", "block_sparse") != "original_full":
        only(c, attention_type="block_sparse")
        return mixers.BigBird(c.get("block_size", 64), c.get("num_random_blocks", 3), layout="zero")
    return None


def _rules(base: str, roberta: bool, pooler: str, lm: str, deep_classifier: bool) -> list[Rule]:
    layer, e = f"{base}.encoder.layer.{{}}.", f"{base}.embeddings."
    heads = {name: name for name in ("query", "key", "value")}
    transform, norm = ("", "layer_norm") if roberta else ("transform.", "LayerNorm")
    sequence, classes = ("classifier.dense", "classifier.out_proj") if deep_classifier else (pooler, "classifier")
    tables = {"tokens": "word", "positions": "position", "token_types": "token_type"}
    return [
        *(Rule(f"embedding/{ours}", f"{e}{theirs}_embeddings.weight", "leaf") for ours, theirs in tables.items()),
        Rule("embedding/norm", e + "LayerNorm", "norm"),
        *modules("layers/attention/", layer + "attention.self.", heads),
        *modules("layers/attention/global_", layer + "attention.self.", {name: f"{name}_global" for name in heads}),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/attention_norm", layer + "attention.output.LayerNorm", "norm"),
        *modules("layers/feedforward/", layer, {"up": "intermediate.dense", "down": "output.dense"}),
        Rule("layers/feedforward_norm", layer + "output.LayerNorm", "norm"),
        *modules("heads/", "", {"token_classification": "classifier", "span": "qa_outputs", "classification": classes}),
        *modules(
            "heads/", "", {"pooled/pooler": pooler, "next_sentence/pooler": pooler, "classification/pooler": sequence}
        ),
        Rule("heads/next_sentence", "cls.seq_relationship", "linear"),
        Rule("heads/language_model/transform", f"{lm}{transform}dense", "linear"),
        Rule("heads/language_model/transform/norm", f"{lm}{transform}{norm}", "norm"),
        Rule("heads/language_model/bias", lm + "bias", "leaf"),
        Rule("heads/language_model/kernel", lm + "decoder.weight", "leaf"),
    ]


NO_IMAGE = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
VIT_FIELDS = {theirs: field for theirs, field in FIELDS.items() if theirs not in NO_IMAGE} | {
    "hidden_dropout_prob": ("dropout_rate", 0.0), "attention_probs_dropout_prob": ("attention_dropout_rate", 0.0),
}  # fmt: skip


def _read_vit(c: Json, names: Collection[str]) -> ModelConfig:
    pair = lambda value: tuple(value) if isinstance(value, list) else (value, value)
    patches = Patches(pair(c.get("image_size", 224)), pair(c.get("patch_size", 16)), c.get("num_channels", 3))
    fields = read_fields(c, VIT_FIELDS)
    only(c, pooler_output_size=fields["d_model"])
    heads = ()
    if architecture(c, "ViTModel", "ViTForImageClassification") == "ViTForImageClassification":
        heads = (Classification(labels(c), pooler=None),)
    elif not names or any("pooler." in name for name in names):
        heads = (Classification(None, pooler=activation(c, "pooler_act", c.get("pooler_act", "tanh")), name="pooled"),)
    return ModelConfig(
        vocab_size=0, context_length=patches.length, masks=(full(),), embedding=patches, heads=heads,
        use_bias=True if c.get("qkv_bias", True) else "out|up|down|norm|patches", **fields,
    )  # fmt: skip


def _write_vit(config: ModelConfig) -> Json:
    patches: Any = config.embedding
    head: Any = config.heads[0] if config.heads else None
    single = lambda pair: pair[0] if len(set(pair)) == 1 else list(pair)
    return (
        write_fields(config, VIT_FIELDS)
        | {
            "architectures": ["ViTForImageClassification" if head and head.classes else "ViTModel"], "model_type": "vit",
            "image_size": single(patches.image), "patch_size": single(patches.patch), "num_channels": patches.channels,
            "qkv_bias": config.has_bias("query"), "pooler_output_size": config.d_model,
            "pooler_act": ACTIVATION_NAME.get(head.pooler if head else "", "tanh"),
        }
        | written_labels(head)
    )  # fmt: skip


def _vit_rules(config: ModelConfig) -> list[Rule]:
    layer, e = "vit.encoder.layer.{}.", "vit.embeddings."
    inner = {"up": "intermediate.dense", "down": "output.dense"}
    return [
        Rule("embedding/patches", e + "patch_embeddings.projection", "patches"),
        Rule("embedding/class_token", e + "cls_token", "leaf2"),
        Rule("embedding/positions", e + "position_embeddings", "leaf1"),
        Rule("layers/attention_norm", layer + "layernorm_before", "norm"),
        *modules("layers/attention/", layer + "attention.attention.", {n: n for n in ("query", "key", "value")}),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/feedforward_norm", layer + "layernorm_after", "norm"),
        *modules("layers/feedforward/", layer, inner),
        Rule("final_norm", "vit.layernorm", "norm"),
        *modules("heads/", "", {"pooled/pooler": "vit.pooler.dense", "classification": "classifier"}),
    ]


FAMILIES = {
    "bert": encoder("Bert", "bert", "bert"),
    "roberta": encoder("Roberta", "roberta", "roberta", roberta=True),
    "longformer": encoder("Longformer", "longformer", "longformer", roberta=True),
    "big_bird": encoder("BigBird", "big_bird", "bert"),
    "vit": Family(_read_vit, _write_vit, _vit_rules, "vit."),
}
