"""Which parts of a regular expression match nothing."""

import re

import pytest

from jaxformer.config.patterns import idle_alternatives

NAMES = [
    "layers/attention/query/kernel",
    "layers/attention/value/kernel",
    "layers/feedforward/up/kernel",
    "embedding/tokens",
]


@pytest.mark.parametrize(
    ("pattern", "idle"),
    [
        ("(query|value)/kernel$", []),
        ("attention/(query|valu)/", ["valu"]),
        ("attention/query|feedforwards", ["feedforwards"]),
        ("(?:attention/(query|key)|feedforward/(up|down))/kernel", ["key", "down"]),
        ("layers/(attention/(query|key)|nothing/(up|down))", ["key", "nothing/(up|down)"]),
        (r"query|(?P<name>val\|ue|value)", [r"val\|ue"]),
        ("(^|/)query|tokens$", []),
        ("[ab(|]query|embed", ["[ab(|]query"]),
        (r"attention/(query|\)xy)", [r"\)xy"]),
        ("^(?!embedding|nothing)", []),
        ("(query|value|)/kernel", []),
        ("(?i:QUERY|KEYS)/", ["KEYS"]),
    ],
)
def test_alternatives_that_match_nothing(pattern, idle):
    re.compile(pattern)
    assert idle_alternatives(pattern, NAMES) == idle
