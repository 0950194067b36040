"""Chat templates and the assistant's tokens, beside transformers' `apply_chat_template`.

The templates are ours, in the manner of twelve public families: what they differ in is the
language, not the text.
"""

import numpy as np
import pytest

from jaxformer.data import chat
from jaxformer.data.chat_template import BUILT_IN, ChatTemplate
from tests.data.test_chat import bpe

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]",
    "[/INST]", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
    "<end_of_turn>",
)  # fmt: skip
SAY = "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
STYLES = {
    **BUILT_IN,
    "blocks of lines": """
{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {{- m['content'] | trim }}
            {{- '<|end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
""",
    "instructions": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    + SAY
    + "{% endif %}{% endfor %}",
    "a system in the first turn": "{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.index0 == 0 %}{{ system }}{% endif %}{{ m.content.strip() + ' [/INST] ' }}"
    "{% else %}" + SAY + "{% endif %}{% endfor %}",
    "roles that are checked": "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ m.role | capitalize ~ ': ' }}{% if m.role == 'assistant' %}"
    + SAY
    + "{% else %}{{ m.content }}{% endif %}{{ '\\n\\n' }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}"
    + SAY
    + "{% else %}{{ m | tojson(indent=2) }}{% endif %}{% endfor %}",
    "a namespace and a break": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if ns.n > 9 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'assistant' %}" + SAY + "{% else %}{{ ns.n ~ m.content }}{% endif %}"
    "{% endfor %}",
    "the last message alone": "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "{% if m.role == 'assistant' %}" + SAY + "{% else %}{{ m.content }}{% endif %}"
    "{% endif %}{% endfor %}",
    "a macro": "{% macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text }}"
    "{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}" + SAY + "{% else %}"
    "{{ turn(m.role, m.content) }}{% endif %}{% endfor %}",
}  # fmt: skip
TALKS = [
    [
        {"role": "system", "content": "Say what it is."},
        {"role": "user", "content": " one é 火 two "},
        {"role": "assistant", "content": "three\n four"},
        {"role": "user", "content": '"five"'},
        {"role": "assistant", "content": "six"},
    ],
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
]


@pytest.fixture(scope="module")
def pair():
    """(our tokenizer, theirs), of one file."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    ours = bpe(*NAMES)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(ours._tokenizer.to_str()), **TOKENS
    )
    return ours, theirs


@pytest.mark.parity
@pytest.mark.parametrize("style", STYLES)
def test_templates_render_as_in_transformers(style, pair):
    """Text, tokens and the assistant's mask, with and without the beginning of an answer."""
    ours, theirs = pair
    source = STYLES[style]
    template = ChatTemplate(source, tuple(TOKENS.items()))
    tokenizer = ours.with_chat(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"é": 1}}}]
    for talk in TALKS:
        for ask in (False, True):
            text = theirs.apply_chat_template(
                talk, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=ask
            )
            assert template.render(talk, ask=ask, tools=tools).text == text
        expected = theirs.apply_chat_template(
            talk,
            tools=tools,
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = chat.encode(tokenizer, talk, tools)
        np.testing.assert_array_equal(found.tokens, expected["input_ids"])
        np.testing.assert_array_equal(found.says, expected["assistant_masks"])
        assert found.says.any()
