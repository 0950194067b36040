"""DeiT."""

from tests.golden.families import _vit

CASES = {
    "deit": _vit("DeiTModel", 3, hidden_act="gelu_new"),
    "deit_teacher": _vit("DeiTForImageClassificationWithTeacher", 1, num_labels=5),
}
