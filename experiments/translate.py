"""Translation with the Transformer of 2017, in a size for two CPU cores: Vaswani et al. 2017, arXiv:1706.03762.

Shared byte-pair encoding, Noam's schedule, label smoothing 0.1, beams of 4 with alpha 0.6, the mean of the last checkpoints.
Expected: TODO
Time: TODO
Command: make train EXP=translate ARGS="--data.train=multi30k/train --data.validation=multi30k/val"
"""

from dataclasses import replace
from typing import Any

from jaxformer.data.pairs import Pairs
from jaxformer.models.presets import transformer_2017
from jaxformer.training import Adam, Checkpoints, Experiment, Noam, TokenCrossEntropy

small = transformer_2017(256, 512, 4, vocab_size=4000, dropout=0.1)
size: dict[str, Any] = dict(num_layers=3, context_length=80, norm_placement="pre", unroll=3)

experiment = Experiment(
    name="translate",
    model=replace(small, encoder=replace(small.encoder, **size), decoder=replace(small.decoder, **size)),
    data=Pairs(train="train", validation="val", source="de", target="en", vocab_size=4000),
    objective=TokenCrossEntropy(label_smoothing=0.1),
    optimizer=Adam(b2=0.98, eps=1e-9),
    schedule=Noam(warmup=400, factor=0.8),
    steps=3000,
    batch_size=32,
    eval_every=250,
    checkpoints=Checkpoints(every=150, keep_latest=8),
)
