"""Texts that a model writes: no more tokens are asked for than it has positions."""

from dataclasses import replace

import jax
import pytest

from jaxformer import models, params
from jaxformer.data.sources import Question
from jaxformer.decoding import Beams, Sampling
from jaxformer.decoding.model import open_model, padded_length
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import answers, new_tokens_for
from jaxformer.models import (
    Alibi,
    Axial,
    EncoderDecoder,
    Learned,
    ModelConfig,
    Relative,
    Sinusoidal,
)
from jaxformer.ops.positions import Rope

MODEL = ModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=8)
PROMPTS = [[1, 2, 3], [4]]
LIMITED = [Learned(), Learned(2), Axial((2, 4), (3, 5))]
OTHERS = [
    None,
    Sinusoidal(),
    Rope(),
    (Rope(), None),
    Alibi(),
    Relative(8, 16, False),
    lambda config: None,
]


@pytest.mark.thorough_after(11)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("positions", LIMITED + OTHERS)
def test_a_text_takes_what_positions_are_left(positions, pair):
    """As many tokens as `generate` accepts, and where there is a table, not one more."""
    config = stack = replace(MODEL, positions=positions)
    if pair:
        config = EncoderDecoder(replace(MODEL, heads=()), stack)
    room = min(new_tokens_for(config, 200, PROMPTS))
    assert room == (5 if positions in LIMITED else 200) and new_tokens_for(config, 2, PROMPTS) == [
        2,
        2,
    ]
    assert new_tokens_for(config, 6, PROMPTS) == ([5, 6] if positions in LIMITED else [6, 6])
    assert padded_length(7, stack) == (8 if positions in LIMITED else 16)
    weights = params.abstract(models.spec(config))
    make = lambda more: (
        lambda w: open_model(config, w, PROMPTS, room + more, [[1], [2]] if pair else None).params
    )
    jax.eval_shape(make(0), weights)
    if positions in LIMITED:
        with pytest.raises(
            ConfigError, match=r"3 prompt \+ 6 new tokens exceed the 8 learned positions"
        ):
            jax.eval_shape(make(1), weights)


class Words:
    """Token 7 is the word 7."""

    def decode(self, tokens):
        return "".join(map(str, tokens))


@pytest.mark.thorough
@pytest.mark.parametrize("how", [Sampling(temperature=0.0), Beams(2)])
def test_an_answer_is_as_long_beside_a_long_prompt_as_alone(how):
    weights = models.init(MODEL, jax.random.key(0))
    ask = lambda prompts: answers(
        MODEL, weights, [Question(prompt, "") for prompt in prompts], Words(), 5, how, rows=2
    )
    prompts = [[1, 2], [3] * 7, [4], [5] * 4]
    found = ask(prompts)
    assert [len(text) for (text,) in found] == [5, 1, 5, 4]
    assert found == [ask([prompt])[0] for prompt in prompts]
    with pytest.raises(
        ConfigError, match="prompt 2 of 3: its 8 tokens leave none of the 8 learned positions"
    ):
        ask([[1], [3] * 8, [4]])
