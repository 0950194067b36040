"""What transformers documents is computed here, or refused by name (`tests.parity.documented` draws
it)."""

import pytest

from tests.parity import ranges

DRAWS = 4
FAMILIES = [
    "bert",
    "big_bird",
    "gpt2",
    "llama",
    "longformer",
    "marian",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "reformer",
    "roberta",
    "t5",
    "vit",
]
FAMILIES += list(ranges.FILES)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("family", FAMILIES)
def test_no_documented_field_is_left_out(family):
    from tests.parity import documented

    drawn = set().union(
        *(documented.sizes(family, documented.random.Random(seed)) for seed in range(50))
    )
    assert not documented.fields(family) - drawn - documented.RANGE.keys() - documented.NO_NUMBER


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_documented_is_computed_or_refused_by_name(family, seed):
    from tests.parity import documented

    drawn = documented.draw(family, seed)
    outcome, why = documented.compare(drawn)
    assert outcome != "wrong", (why, drawn.kind.__name__, drawn.settings)
