"""Characters of Shakespeare: nanoGPT's recipe in its GPU size, 10.6 M parameters.

Expected: best validation loss about 1.47 (nanoGPT's README: 1.4697); later it overfits, and the
best checkpoint is kept.
Time: 3 minutes on one A100 by nanoGPT's README; not run by us. Hours on two CPU cores.
Command: make train EXP=shakespeare_char_gpu ARGS="--data.path=tinyshakespeare.txt"
"""

from dataclasses import replace

from experiments.shakespeare_char import experiment as cpu
from jaxformer.training import AdamW

experiment = replace(
    cpu,
    name="shakespeare_char_gpu",
    model=replace(
        cpu.model,
        num_layers=6,
        d_model=384,
        num_heads=6,
        context_length=256,
        dropout_rate=0.2,
        attention_dropout_rate=0.2,
    ),
    optimizer=AdamW(learning_rate=1e-3, b2=0.99),
    steps=5000,
    batch_size=64,
    precision="bfloat16",
    eval_every=250,
)
