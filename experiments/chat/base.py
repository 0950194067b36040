"""A small decoder that reads statements about sums, dates, units and spellings, byte by byte.

It learns the facts, not to answer: `chat/sft` begins with its parameters.
Expected: a validation loss of 0.590, 0.564 and 0.575 nats a byte (seeds 0, 1, 2). Most of it is the
random choice of each fact.
Time: 8 minutes on two CPU cores.
Command: make train EXP=chat/base
"""

from experiments.chat._tasks import Statements
from experiments.quickstart import experiment as quickstart
from jaxformer.training import Experiment, Sample

experiment = Experiment(
    name="chat_base",
    model=quickstart.model,
    data=Statements(),
    optimizer=quickstart.optimizer,
    schedule=quickstart.schedule,
    steps=2000,
    batch_size=16,
    precision="bfloat16",
    eval_every=500,
    sample=Sample(prompt="17 + 25 =", tokens=60),
)
