"""What a function does, in a sentence: from Python source to docstrings.

The source is a function of Python's standard library without its docstring, as ast.unparse writes
it. The target is the first paragraph of the docstring. Every tenth function is for validation;
other functions of its class may be in the training split. An encoder-decoder with a shared
vocabulary (Vaswani et al. 2017).

Expected: ROUGE-1 18.2, ROUGE-2 5.3, ROUGE-L 17.1, BLEU 3.2 on 200 unseen functions (seed 0, CPU,
greedy). After 500 steps ROUGE-L is 16.4 and BLEU 0.9: the model learns the style of summaries soon,
and what a function does only slowly. The training loss falls to 1.9, but the validation loss stays
at 4.0, because some thousand functions are few. Targets longer than 32 tokens are left out.
Time: 7 minutes on 2 CPU cores.

Command: make train EXP=summarise_code
    make generate EXP=summarise_code ARGS="--prompt 'def f(self): return self.x'"
"""

import ast
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.bert_pretrain import modules
from jaxformer.data import pairs, tokenizers
from jaxformer.data.records import Problems
from jaxformer.data.sources import Dataset
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import bleu, rouge
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.training import AdamW, Cosine, Experiment, Sample


def functions() -> list[pairs.Pair]:
    """(place, source, first paragraph of the docstring) of each function that has both, once."""
    pair_of = {}  # {source: its pair}
    for name, tree in modules(Path(sysconfig.get_path("stdlib"))):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                summary = " ".join((ast.get_docstring(node) or "").strip().split("\n\n")[0].split())
                if summary:
                    node.body = node.body[1:]
                    source = ast.unparse(node)
                    pair = pairs.Pair(f"{name}:{node.lineno}", source, summary)
                    pair_of.setdefault(source, pair)
    return list(pair_of.values())


@dataclass(frozen=True)
class Functions:
    """Pairs of source and summary.

    Sources are cut. Pairs that still do not fit the model are left out and counted.
    """

    vocab_size: int = 2000  # byte pairs, of sources and targets
    characters: int = 260  # of a source that are read

    def open(self, model) -> Dataset:
        cut = [pair._replace(source=pair.source[: self.characters]) for pair in functions()]
        learned = [pair for i, pair in enumerate(cut) if i % 10]
        held_out = cut[::10]
        text = "\n".join(f"{pair.source}\n{pair.target}" for pair in learned)
        tokenizer = tokenizers.BPE.train(text, self.vocab_size)
        buckets = pairs.Buckets((48,))
        return pairs.open_pairs(
            learned, held_out, tokenizer, model, buckets, Problems("skip"), "functions"
        )

    def question(self, model, tokenizer, text):
        return pairs.question(model, tokenizer, text[: self.characters])


stack = ModelConfig(
    vocab_size=2000,
    num_layers=2,
    d_model=64,
    num_heads=2,
    context_length=32,
    feedforward="gelu",
    init_std=0.1,
)
experiment = Experiment(
    name="summarise_code",
    model=EncoderDecoder(
        encoder=replace(stack, heads=(), masks=(full(),), context_length=128), decoder=stack
    ),
    data=Functions(),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=50),
    steps=3000,
    batch_size=32,
    eval_every=250,
    metrics=(Generated(scores=(rouge, bleu), max_tokens=31, examples=200),),
    sample=Sample(prompt="def add(self, item):\n    self.items.append(item)", tokens=30),
)
