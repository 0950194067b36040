"""The decoder of chat/base learns to answer in a conversation; only its own words have weight.

Expected: 51.5 % of 200 unseen questions answered exactly (seed 0), and a validation loss of 0.352
nats a byte of the answers. It always ends its turn by itself.
Time: 4 minutes on two CPU cores; 12 beside other work.
Command: make train EXP=chat/base, then make train EXP=chat/sft
Then: make generate EXP=chat_sft ARGS=--chat
"""

from dataclasses import replace

from experiments.chat._tasks import Talks
from experiments.chat.base import experiment as base
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.training import AdamW, Cosine, Sample

experiment = replace(
    base,
    name="chat_sft",
    initial="chat_base",
    data=Talks(),
    optimizer=AdamW(learning_rate=1e-3, b2=0.98),
    schedule=Cosine(warmup=20),
    steps=1000,
    eval_every=500,
    metrics=(Generated(scores=(exact_match,), max_tokens=24, examples=200),),
    sample=Sample(prompt="What is 17 + 25?", tokens=24),
)
