"""The decoder of chat/base learns to answer in a conversation; only its own words have weight.

Expected: of 1,000 unseen questions 94.2 % answered exactly (seed 0): sums 98.5 %, chains of sums
75.5 %, dates 97 %, units 100 %, spelling 100 %. Seed 1: 95.0 %, chains 81.5 %.
Time: 12 minutes on two CPU cores beside other work.
Command: make train EXP=chat/base, then make train EXP=chat/sft
Then: make generate EXP=chat_sft ARGS=--chat
"""

from dataclasses import replace

from experiments.chat._facts import SUMS_FIRST
from experiments.chat._tasks import ExactByKind, Talks
from experiments.chat.base import experiment as base
from jaxformer.training import AdamW, Cosine, Sample

experiment = replace(
    base,
    name="chat_sft",
    initial="chat_base",
    data=Talks(training=60_000, kinds=SUMS_FIRST),
    optimizer=AdamW(learning_rate=1e-3, b2=0.98),
    schedule=Cosine(warmup=20),
    steps=2000,
    eval_every=1000,
    metrics=(ExactByKind(),),
    sample=Sample(prompt="What is 17 + 25?", tokens=24),
)
