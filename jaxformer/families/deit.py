"""DeiT: a ViT with a distillation token behind the class token."""

from jaxformer.families.classes import count_labels
from jaxformer.families.family import Rule
from jaxformer.families.settings import Json
from jaxformer.families.vit import Vit, vit
from jaxformer.zoo.distilled import DistilledClassification


def _more_heads(c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name, in addition to those of ViT."""
    return {"ForImageClassificationWithTeacher": (DistilledClassification(count_labels(c)),)}


RULES = (
    Rule("embedding/extra_tokens", "deit.embeddings.distillation_token", "leaf1"),
    Rule("heads/distilled_classification/class_token", "cls_classifier"),
    Rule("heads/distilled_classification/distillation_token", "distillation_classifier"),
)
FAMILIES = {"deit": vit(Vit("DeiT", "deit", 1, _more_heads), RULES)}
