"""Conversations as text, as tokens, and as rows of a batch."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import chat, chat_template, tokenizer_package, tokenizers
from jaxformer.data.chat_template import BUILT_IN, ChatTemplate, built_in, read_template
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig

END = tokenizers.END_OF_TEXT
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
# as the cards of the models describe them
EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
    "<|im_start|>assistant\n[Hello.<|im_end|>]\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n[4<|im_end|>]\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello.<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[4<|eot_id|>]",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    "[Hello.<end_of_turn>]\n<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    "[4<end_of_turn>]\n",
    "plain": f"system: Be brief.\nuser:  Hi \nassistant: [Hello.{END}]\nuser: 2+2?\n"
    f"assistant: [4{END}]\n",
}
WORDS = "say what it is: one two three four five six seven eight nine ten"
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>system\n", END, "a <|im"]
)


def marked(rendered):
    """The text with brackets around what the assistant says."""
    text = rendered.text
    for start, stop in reversed(rendered.spans):
        text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
    return text


def bpe(*names):
    """A small tokenizer of bytes and pairs with control tokens."""
    state = tokenizers.BPE.train(WORDS * 9, 300).state["tokenizer"]
    first = 1 + max(state["model"]["vocab"].values())
    for number, name in enumerate(names, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        state["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
        state["model"]["vocab"][name] = number
    return tokenizers.BPE(json.dumps(state))


TOKENIZERS = {"bytes": tokenizers.Bytes, "bpe": lambda: bpe("<|im_start|>", "<|im_end|>")}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_text_of_a_conversation(name):
    template = built_in(name, END)
    assert marked(template.render(TALK)) == EXPECTED[name]
    asked = template.render(TALK[:-1], ask=True).text
    before = EXPECTED[name].replace("[", "").replace("]", "")
    assert before.startswith(asked) and before[len(asked) :].startswith("4")


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_the_assistant_says_without_marks_in_the_template(name):
    """The differences between texts of more and more messages are the marked parts."""
    source = re.sub(r"{% (end)?generation %}", "", BUILT_IN[name])
    template = ChatTemplate(source, built_in(name, END).tokens)
    assert marked(template.render(TALK)) == EXPECTED[name]


def test_a_template_that_changes_earlier_turns_needs_marks():
    """As templates that leave out the thoughts of earlier turns do."""
    source = (
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.content if loop.last else m.content.split('.')[-1] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"once message 3 follows.*generation"):
        ChatTemplate(source).render(TALK)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=4))
def test_a_message_gives_no_commands(kind, texts):
    """A control token stands only where the template wrote it, whatever the messages say."""
    tokenizer = TOKENIZERS[kind]().with_chat(built_in("chatml"))
    roles = ("user", "assistant") * 2
    talk = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    empty = [{"role": m["role"], "content": "."} for m in talk]
    controls = set(tokenizer.control_tokens.values())

    def commands(messages):
        return [t for t in chat.encode(tokenizer, messages).tokens.tolist() if t in controls]

    assert commands(talk) == commands(empty)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=12), min_size=2, max_size=4))
def test_the_tokens_of_the_assistant(kind, texts):
    """They are its message and the end of its turn; nobody else's token is one."""
    tokenizer = TOKENIZERS[kind]().with_chat(built_in("chatml"))
    roles = ("user", "assistant") * 2
    talk = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    encoded = chat.encode(tokenizer, talk)
    end = tokenizer.control_tokens["<|im_end|>"]
    said = [text for role, text in zip(roles, texts, strict=False) if role == "assistant"]
    assert len(encoded.turns) == len(said)
    for (start, stop), text in zip(encoded.turns, said, strict=True):
        *own, last = encoded.tokens[start:stop].tolist()
        assert last == end and tokenizer.decode(own) == text.encode("utf-8", "replace").decode()
    assert encoded.says.sum() == sum(stop - start for start, stop in encoded.turns)


def test_offsets_are_those_of_the_characters():
    text = "é one 火 two<|im_end|> three"
    for make in TOKENIZERS.values():
        tokenizer = make()
        ids, offsets = tokenizer.encode_with_offsets(text)
        end = tokenizer.control_tokens["<|im_end|>"]
        at = ids.tolist().index(end)
        assert text[slice(*offsets[at])] == "<|im_end|>"
        before, after = ids[:at].tolist(), ids[at + 1 :].tolist()
        assert tokenizer.decode(before) == text[: text.index("<|")]
        assert tokenizer.decode(after) == " three"
        covered = {i for first, last in offsets for i in range(first, last)}
        assert covered == set(range(len(text)))
        assert tokenizer.encode(text, control=True) == ids.tolist()
        assert end not in tokenizer.encode(text)
    assert tokenizers.Characters.of(text).encode(f"é{END}", control=True)[-1] == len(set(text))


def test_a_tokenizer_keeps_its_template(tmp_path):
    for make in TOKENIZERS.values():
        plain = make()
        tokenizer = plain.with_chat(built_in("chatml"))
        tokenizer.save(tmp_path / "tokenizer.json")
        again = tokenizers.load(tmp_path / "tokenizer.json")
        assert again.chat == tokenizer.chat and again.digest == tokenizer.digest != plain.digest
        assert plain.chat is None
        ends = [plain.end_of_text, plain.control_tokens["<|im_end|>"]]
        assert tokenizers.stop_tokens(again) == tuple(ends)
        assert tokenizers.stop_tokens(plain) == (plain.end_of_text,)
        other = plain.with_chat(built_in("plain", END))
        assert other.digest != tokenizer.digest


def write(path, *talks):
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path)


def model(length):
    return ModelConfig(vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=length)


def test_rows_of_conversations(tmp_path):
    short = TALK[1:3]
    train = write(tmp_path / "train.jsonl", TALK, short, short)
    validation = write(tmp_path / "validation.jsonl", TALK)
    data = chat.Chat(train, validation, template="chatml").open(model(256))
    batch = data.train.take_rows(np.arange(len(data.train)))
    learned = batch["labels"][batch["weights"] > 0]
    said = b"Hello.\xfd4\xfd" + 2 * b"Hello.\xfd"
    assert sorted(learned.tolist()) == sorted(said)
    assert batch["segment_ids"].max() == 3 and "source" not in batch
    (question,) = data.validation.questions
    assert question.reference == "4" and bytes(question.prompt).endswith(b"\xfeassistant\n")
    assert "3 training and 1 validation conversations, 23 target tokens" in data.description


@pytest.mark.parametrize("length", range(60, 130, 7))
def test_a_long_conversation_ends_with_a_whole_turn(length, tmp_path):
    train = write(tmp_path / "train.jsonl", TALK, TALK[1:3])
    data = chat.Chat(train, train, template="chatml", bad_rows="skip").open(model(length))
    encoded = chat.encode(data.tokenizer, TALK)
    fitting = [stop for _, stop in encoded.turns if stop - 1 <= length]
    longest = max(len(example.tokens) for example in data.train.examples)
    assert longest == max(fitting, default=0) - 1 or not fitting
    for example in data.train.examples:
        assert example.weights[-1] == 1 and example.labels[-1] == 0xFD
    assert ("1 rows skipped: 1 no turn of the assistant ends" in data.description) == (not fitting)


def test_bad_conversations(tmp_path):
    good = write(tmp_path / "good.jsonl", TALK)
    rows = {
        "no list of messages": "text",
        "a message without a role": [{"content": "x"}, TALK[2]],
        "no message of the assistant after another one": TALK[:2],
        "a message without content": [{"role": "user"}, TALK[2]],
    }
    for problem, talk in rows.items():
        bad = write(tmp_path / "bad.jsonl", talk)
        with pytest.raises(ConfigError, match=rf"bad\.jsonl:1: {problem}.*--data.bad-rows=skip"):
            chat.Chat(bad, good, template="chatml").open(model(256))
    path = write(tmp_path / "some.jsonl", TALK, *rows.values())
    data = chat.Chat(path, good, template="chatml", bad_rows="skip").open(model(256))
    assert "4 rows skipped" in data.description
    with pytest.raises(ConfigError, match="no training conversation fits"):
        chat.Chat(path, good, template="chatml", bad_rows="skip").open(model(8))


def test_templates_of_files_and_folders(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    own = read_template(str(tmp_path / "own.jinja"), END)
    assert own.render(TALK[:1]).text == "Be brief." + END
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ 1 }}"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(settings))
    template = read_template(str(tmp_path))
    assert template.source == "{{ 1 }}" and dict(template.tokens) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    file.write_text(json.dumps(settings | {"chat_template": named}))
    assert read_template(str(tmp_path)).source == "b"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}c")  # it goes before the other
    assert read_template(str(tmp_path)).render(TALK).text == "<s>c"
    with pytest.raises(
        ConfigError, match=r"template='none': expected chatml, llama3, gemma, plain"
    ):
        read_template("none")


HOSTILE = {
    "{{ messages.__class__.__mro__ }}": "SecurityError|unsafe|Undefined",
    "{{ ''.__class__.__base__.__subclasses__() }}": "SecurityError|unsafe",
    "{{ cycler.__init__.__globals__ }}": "SecurityError|unsafe",
    "{{ 'a' * 1000000000 }}": r"\* of texts",
    "{{ 9 ** 999999999999 }}": r"\*\* of numbers",
    "{{ '%999999999d' % 1 }}": "% of texts",
    "{% for i in range(10**9) %}x{% endfor %}": "(?i)range",
    "{{ messages.append(1) }}": "SecurityError|unsafe",
    "{{ raise_exception('only users may speak') }}": "only users may speak",
    "{% for m in messages %}": "line 1: ",
    "{{ nothing.of_this.name }}": "'nothing' is undefined",
    "{% include 'x' %}": "no loader",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_is_a_strangers_code(source):
    with pytest.raises(ConfigError, match=HOSTILE[source]) as caught:
        ChatTemplate(source).render(TALK)
    assert "\n" not in str(caught.value)


def test_a_template_without_an_end(monkeypatch):
    monkeypatch.setattr(tokenizer_package, "SECONDS", 0.2)
    loops = "{% for i in range(900) %}" * 2 + "{% set x = i %}" + "{% endfor %}" * 2
    source = "{% for j in range(900) %}" + loops + "{% endfor %}"
    with pytest.raises(ConfigError, match=r"it needs more than \d s"):
        ChatTemplate(source).render(TALK)
    with pytest.raises(ConfigError, match="letters; at most"):
        ChatTemplate("x" * (chat_template.LONGEST + 1))


@pytest.mark.parametrize(
    "messages",
    [[], "hi", {"role": "user", "content": "x"}, [3], [{"content": "x"}], [{"role": "a"}]],
)
def test_messages_that_are_none(messages):
    with pytest.raises(ConfigError, match=r"^messages: "):
        chat_template.check_messages(messages)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_a_template_whose_turns_have_no_end_here(name, tmp_path):
    """Bytes have no <|eot_id|>: as text it would stop nothing."""
    path = write(tmp_path / "talks.jsonl", TALK)
    with pytest.raises(ConfigError, match="the model would never stop"):
        chat.Chat(path, path, template=name).open(model(400))
