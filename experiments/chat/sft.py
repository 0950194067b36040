"""The decoder of chat/base learns to answer in a conversation; only its own words have weight.

Expected: of 1,000 unseen questions 94.7, 91.3 and 93.6 % answered exactly (seeds 0, 1, 2): sums
99.5, 90 and 97.5 %, chains of sums 77, 69.5 and 73.5 %, dates 97 %, units and spelling 100 %.
After 2,000 steps it was 89.1 % (seed 0).
Time: 10 minutes on two CPU cores.
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
    steps=2500,
    eval_every=1250,
    metrics=(ExactByKind(),),
    sample=Sample(prompt="What is 17 + 25?", tokens=24),
)
