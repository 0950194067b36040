"""GPT-2 small (124M) from scratch: Radford et al. 2019, trained as nanoGPT on OpenWebText.

Expected: validation loss about 2.85 nats a GPT-2 token after 600,000 steps (nanoGPT's README).
Time: about four days on 8 A100 by the same README. Not run by us: this needs real hardware. We ran
its start and its reading of data, with one layer.
Data: a folder of .txt, .jsonl or .parquet files (docs/data.md), or a data set of the Hugging Face
hub, which is streamed once (54 GB of text become 18 GB of tokens in ~/.cache/jaxformer;
--data.cache=DIR puts them elsewhere).

Command: make train EXP=gpt2_small ARGS="--data.path=openwebtext/"
     or: make train EXP=gpt2_small ARGS="--data.path=hf:Skylion007/openwebtext#train"
Without a network: --data.tokenizer=gpt2/tokenizer.json,
or --data.tokenizer=bpe --data.vocab-size=50257
"""

from dataclasses import replace

from jaxformer.data.corpus import Corpus
from jaxformer.models.presets import gpt2_small
from jaxformer.training import AdamW, Checkpoints, Cosine, Experiment, Sample

experiment = Experiment(
    name="gpt2_small",
    # rounded up to a multiple of 128, so that the largest product has whole tiles
    model=replace(
        gpt2_small, vocab_size=50304, dropout_rate=0.0, attention_dropout_rate=0.0, use_bias=False
    ),
    data=Corpus(path="openwebtext/", tokenizer="openai-community/gpt2", validation_fraction=0.0005),
    optimizer=AdamW(learning_rate=6e-4, b2=0.95),
    schedule=Cosine(warmup=2000, final=0.1),
    steps=600_000,
    batch_size=480,
    accumulation=40,
    precision="bfloat16",
    eval_every=1000,
    eval_examples=9_600,
    checkpoints=Checkpoints(every=2000),
    sample=Sample(prompt="The meaning of life is", tokens=200),
)
