"""Five kinds of small runs, whose folders transformers opens: experiments as files."""

import contextlib
import io
from pathlib import Path

from jaxformer import cli
from tests.tiny import TEXT

HEAD = """
from dataclasses import dataclass, replace
from jaxformer.data.images import Digits
from jaxformer.data.pairs import open_pairs, Pair, question
from jaxformer.data.sources import Text
from jaxformer.data.tokenizers import Bytes
from jaxformer.models import LanguageModel
from jaxformer.objectives import ClassCrossEntropy, MaskedTokens
from jaxformer.training import Experiment, Sample
from jaxformer.zoo import PRESETS
"""
LANGUAGE = """
experiment = Experiment(
    name="{name}",
    model=replace(PRESETS["{preset}"], vocab_size={size}, num_layers=2, d_model=32, num_heads=4,
                  d_ff=48, context_length=48, {more}),
    data=Text(path="text.txt", {data}),
    objective={objective},
    steps=3, batch_size=4, log_every=1, sample=Sample("{prompt}", tokens=8),
)
"""
PAIRS = """
@dataclass(frozen=True)
class Echo:
    def open(self, model):
        pairs = [Pair(i, str(i) * 3, str(i)[::-1]) for i in range(40)]
        return open_pairs(pairs[:30], pairs[30:], Bytes(), model)

    def question(self, model, tokenizer, text, reference=""):
        return question(model, tokenizer, text, reference)

t5 = PRESETS["t5_small"]
size = dict(vocab_size=256, num_layers=2, d_model=32, num_heads=4, head_width=8, d_ff=48,
            context_length=24)
experiment = Experiment(
    name="translator",
    model=replace(t5, encoder=replace(t5.encoder, **size),
                  decoder=replace(t5.decoder, heads=(LanguageModel(scale=32**-0.5),), **size)),
    data=Echo(), steps=3, batch_size=4, log_every=1, sample=Sample("777", tokens=8),
)
"""
IMAGES = """
vit = PRESETS["vit_base"]
patches = replace(vit.embedding, image=(8, 8), patch=(4, 4), channels=1)
experiment = Experiment(
    name="images",
    model=replace(vit, num_layers=2, d_model=32, num_heads=4, d_ff=48, context_length=5,
                  embedding=patches, heads=(replace(vit.heads[0], classes=10),)),
    data=Digits(), objective=ClassCrossEntropy(), steps=3, batch_size=4, log_every=1,
)
"""


def language(name, preset, size, data="", objective="None", prompt="the ", more=""):
    return LANGUAGE.format(
        name=name,
        preset=preset,
        size=size,
        data=data,
        objective=objective,
        prompt=prompt,
        more=more,
    ).replace("    objective=None,\n", "")


KINDS = {
    "decoder": language("decoder", "gpt2_small", 256),
    "unbiased": language("unbiased", "gpt2_small", 256, more="use_bias=False"),
    "pieces": language(
        "pieces", "llama2_7b", 300, 'tokenizer="bpe", vocab_size=300, cache="cache"'
    ),
    "letters": language("letters", "llama2_7b", 40, 'tokenizer="characters"'),
    "hidden": language(
        "hidden",
        "bert_base",
        257,
        objective="MaskedTokens(mask_token=256)",
        more='heads=PRESETS["bert_base"].heads[:1]',
    ),
    "translator": PAIRS,
    "images": IMAGES,
}


def exported(kind: str, folder: Path, *options: str) -> tuple[Path, Path]:
    """(the run, the exported folder) of a run of this kind in `folder`."""
    (folder / "experiments").mkdir(exist_ok=True)
    (folder / "experiments" / f"{kind}.py").write_text(HEAD + KINDS[kind])
    (folder / "text.txt").write_text(TEXT)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["train", kind]) == 0
        assert cli.main(["export", kind, "exported", *options]) == 0
    return next((folder / "runs").glob(f"{kind}-*")), folder / "exported"
