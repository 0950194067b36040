"""What users of other projects reported about exported models, tried on ours."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest

from jaxformer import cli, families
from jaxformer.params import paths
from jaxformer.runs.run import open_run
from tests.runs.test_chat import EXPERIMENT
from tests.tiny import furnish

TALK = [
    {"role": "system", "content": "answer with a number"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two, é"},
]
LORA = """
from dataclasses import replace
from experiments.tiny import experiment as tiny
from jaxformer.models.adaptation import Lora
experiment = replace(tiny, name="lora", initial="tiny", adaptation=Lora(rank=2), metrics=())
"""


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with a run of conversations, one of LoRA on top, and both exported."""
    source = EXPERIMENT.replace("steps=150", "steps=6").replace("every=75", "every=3")
    folder = furnish(tmp_path_factory.mktemp("chats"), source)
    (folder / "experiments" / "lora.py").write_text(LORA)
    (folder / "talks.jsonl").write_text((json.dumps({"messages": TALK[:3]}) + "\n") * 8)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for name in ("tiny", "lora"):
            assert cli.main(["train", name]) == 0
            assert cli.main(["export", name, f"{name}-out"]) == 0
    return folder


def run_of(folder, name):
    return open_run(next((folder / "runs").glob(f"{name}-*")))


@pytest.mark.report(
    "hiyouga/LlamaFactory#7454",
    "hiyouga/LlamaFactory#9338",
    "huggingface/open-r1#663",
    "NVIDIA-NeMo/Automodel#3890",
    right="config, generation and tokenizer name the token that ends a turn",
    hit="tokenizer_config.json named the end of a text alone, when it was first written",
)
@pytest.mark.thorough
def test_an_answer_ends_for_every_reader(chats):
    """The ends of a turn and of a text, in each file that somebody reads."""
    out = chats / "tiny-out"
    ends = [0xFF, 0xFD]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == ends
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert families.load(out).decoding()["stop_tokens"] == tuple(ends)


@pytest.mark.report(
    "tloen/alpaca-lora#479",
    "tloen/alpaca-lora#333",
    "teelinsan/camoscio#2",
    "Lightning-AI/litgpt#1871",
    right="a folder of merged weights opens alone, with its tokenizer",
)
@pytest.mark.thorough
def test_an_adaptation_is_merged_and_keeps_its_tokenizer(chats):
    merged, out = run_of(chats, "lora").params, chats / "lora-out"
    base = run_of(chats, "tiny").params
    found = paths(families.load(out).params)
    moved = 0
    for (path, ours), before in zip(paths(merged).items(), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(found[path], ours)
        moved += bool((np.asarray(ours) != np.asarray(before)).any())
    assert moved > 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (chats / "tiny-out" / name).read_bytes()


@pytest.mark.report(
    "hiyouga/LlamaFactory#8399",
    "hiyouga/LlamaFactory#5836",
    "Lightning-AI/litgpt#1986",
    "QwenLM/Qwen3-VL#1488",
    right="the template of the training is that of the exported tokenizer",
)
@pytest.mark.parity
def test_a_conversation_has_the_same_tokens(chats):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(chats / "tiny-out")
    ours = run_of(chats, "tiny").tokenizer
    for messages, asks in ((TALK, True), (TALK[:3], False), (TALK[1:2], True)):
        rendered = ours.chat.render(messages, control_tokens=ours.control_tokens, ask=asks)
        options = dict(add_generation_prompt=asks, return_dict=False)
        theirs = tokenizer.apply_chat_template(messages, **options)
        assert theirs == ours.encode(rendered.text, control=True)
    assert len(tokenizer) == 256 and tokenizer.eos_token_id == 0xFD


@pytest.mark.report(
    "unslothai/unsloth#384",
    right="generate stops by itself at any of the model's ends",
)
@pytest.mark.parity
def test_generation_stops_at_each_end(chats):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(chats / "lora-out").eval()
    ids = torch.tensor([[1, 2, 3]])
    for token, length in ((0xFF, 1), (0xFD, 1), (65, 4)):  # 65 is no end

        def only(_, scores, token=token):
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

        chain = transformers.LogitsProcessorList([only])
        written = model.generate(ids, max_new_tokens=4, logits_processor=chain)
        assert written.shape[1] == 3 + length
