"""A small decoder that reads statements about sums, dates, units and spelling, byte by byte.

It learns the facts, not to answer: `chat/sft` begins with its parameters.
Expected: see chat/sft.
Command: make train EXP=chat/base
"""

from experiments.chat._tasks import Statements
from jaxformer.masks import causal, window
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.training import AdamW, Cosine, Experiment, Sample

experiment = Experiment(
    name="chat_base",
    model=ModelConfig(
        vocab_size=256,
        num_layers=4,
        d_model=128,
        num_heads=4,
        context_length=128,
        feedforward="relu2",
        norm="rms_norm",
        positions=Rope(),
        masks=(causal() & window(127),),
        use_bias=False,
    ),
    data=Statements(),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=50),
    steps=2500,
    batch_size=16,
    precision="bfloat16",
    eval_every=500,
    sample=Sample(prompt="17 + 25 =", tokens=60),
)
