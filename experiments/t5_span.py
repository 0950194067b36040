"""T5's span corruption on bytes: an encoder-decoder restores spans of Python's source text.

Raffel et al. 2020, arXiv:1910.10683, section 3.1.4: 15 % of the text of Python's standard library,
in spans of three on average.
Expected: validation loss about 2.5 nats a target byte (the text's unigram entropy is 3.2).
Time: six to eight minutes on two CPU cores.
Command: make train EXP=t5_span
"""

from jaxformer.data.sources import Stdlib
from jaxformer.models import EncoderDecoder
from jaxformer.models.presets import sized, t5_v1_1_small
from jaxformer.training import AdamW, Cosine, Experiment, SpanCorruption

SIZE = dict(
    num_layers=2,
    d_model=128,
    num_heads=4,
    head_width=32,
    d_ff=256,
    vocab_size=280,
    context_length=128,
    dropout_rate=0.0,
)

experiment = Experiment(
    name="t5_span",
    model=EncoderDecoder(
        sized(t5_v1_1_small.encoder, **SIZE), sized(t5_v1_1_small.decoder, **SIZE), True
    ),
    data=Stdlib(),
    # 256 bytes, an end token, and more sentinels than a text has spans
    objective=SpanCorruption(sentinel=279, end=256),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=50),
    steps=1000,
    batch_size=32,
    eval_every=500,
    eval_examples=1280,
    final_examples=1280,
)
