"""BERT's masked language model on bytes: an encoder predicts hidden bytes of Python's source.

Devlin et al. 2018, arXiv:1810.04805, section 3.1, without next-sentence prediction: 15 % of the
bytes of Python's standard library are hidden.
Expected: validation loss about 1.5 nats a hidden byte (the text's unigram entropy is 3.2).
Time: about four minutes on two CPU cores.
Command: make train EXP=masked_bytes
"""

from jaxformer.data.sources import Stdlib
from jaxformer.masks import full
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.training import AdamW, Cosine, Experiment, MaskedTokens

experiment = Experiment(
    name="masked_bytes",
    model=ModelConfig(
        vocab_size=257,  # 256 bytes, and the token that replaces a hidden one
        num_layers=4,
        d_model=128,
        num_heads=4,
        context_length=128,
        feedforward="gelu",
        positions=Rope(),
        masks=(full(),),
    ),
    data=Stdlib(),
    objective=MaskedTokens(mask_token=256),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=50),
    steps=600,
    batch_size=32,
    eval_every=300,
    eval_examples=1280,
    final_examples=1280,
)
