"""Characters of Shakespeare: nanoGPT's smallest recipe in its CPU size.

https://github.com/karpathy/nanoGPT, README. The learning rate is twice nanoGPT's. With nanoGPT's
1e-3 the loss is still falling after 2000 steps (1.896, 1.898, 1.906 for three seeds).
Expected: validation loss 1.81 to 1.82 over the whole split (nanoGPT's own code and rate, same
measure: 1.898).
Time: about a minute and a half on two CPU cores.
Command: make train EXP=shakespeare_char ARGS="--data.path=tinyshakespeare.txt"
"""

from jaxformer.data.sources import Text
from jaxformer.models import ModelConfig
from jaxformer.training import AdamW, Cosine, Experiment, Sample

experiment = Experiment(
    name="shakespeare_char",
    model=ModelConfig(
        vocab_size=65,
        num_layers=4,
        d_model=128,
        num_heads=4,
        context_length=64,
        feedforward="gelu",
        use_bias=False,
    ),
    data=Text(
        path="tinyshakespeare.txt",
        tokenizer="characters",
        origin="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
        "input.txt (1.1 MB)",
    ),
    optimizer=AdamW(learning_rate=2e-3, b2=0.99),
    schedule=Cosine(warmup=100, final=0.1),
    steps=2000,
    batch_size=12,
    precision="bfloat16",
    eval_every=500,
    sample=Sample(prompt="ROMEO:", tokens=300),
)
