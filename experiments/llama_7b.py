r"""LLaMA 7B on your own text: Touvron et al. 2023, arXiv:2302.13971, table 2.

Expected: the paper ends at about 1.76 nats a token after a trillion tokens (its figure 1). Byte
pairs are learned from your text, so compare in bits a byte. For another tokenizer:
--data.tokenizer=DIR/tokenizer.json --data.vocab-size=None.
Time: 82,432 A100 hours by the paper's table 15. Not run by us: this needs a pod. We ran its start
and the reading of its data, with one layer. First look at the plan, which costs nothing:
make plan EXP=llama_7b TOPOLOGY=v5e:16x16
Data: a folder of .txt, .jsonl or .parquet files (docs/data.md) that all hosts see, or
hf:NAME,CONFIG#SPLIT. With a cache that all hosts see (--data.cache=/mnt/bucket/tokens) each encodes
its share; `make tokens` with the same options does it before.

Command: make pod-train EXP=llama_7b TPU=my-pod ZONE=... TOPOLOGY=v5e:16x16 BUCKET=... \
    ARGS="--data.path=/mnt/bucket/text/"
"""

from dataclasses import replace

from jaxformer.data.corpus import Corpus
from jaxformer.models.presets import llama_7b
from jaxformer.parallel import Mesh
from jaxformer.training import AdamW, Checkpoints, Cosine, Experiment

experiment = Experiment(
    name="llama_7b",
    model=replace(llama_7b, remat="full"),
    data=Corpus(path="text/", tokenizer="bpe", vocab_size=32000, validation_fraction=0.0005),
    mesh=Mesh(data=-1, fsdp=64),
    optimizer=AdamW(learning_rate=3e-4, b2=0.95),
    schedule=Cosine(warmup=2000, final=0.1),
    steps=250_000,
    batch_size=2048,  # 4.2 million tokens
    accumulation=4,
    precision="bfloat16",
    eval_every=1000,
    eval_examples=40_960,
    checkpoints=Checkpoints(every=1000),
)
