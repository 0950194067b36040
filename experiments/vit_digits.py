"""A small vision transformer on scikit-learn's handwritten digits, 8 x 8 pixels, ten classes.

Dosovitskiy et al. 2020, arXiv:2010.11929, with four patches. Digits turn and shift a little in
training. Needs pip install 'jaxformer[vision]'.
Expected: validation accuracy 99.4 % (358 of 360 digits; seed 0).
Time: 26 seconds on 2 CPU cores.
Command: make train EXP=vit_digits
"""

from jaxformer.data.augment import Move
from jaxformer.data.images import Digits
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.training import AdamW, ClassCrossEntropy, Cosine, Experiment

experiment = Experiment(
    name="vit_digits",
    model=ModelConfig(
        vocab_size=0,
        num_layers=4,
        d_model=64,
        num_heads=4,
        context_length=4,
        feedforward="gelu",
        embedding=Patches(image=(8, 8), patch=(4, 4), channels=1, class_token=False),
        heads=(Classification(10, pool="mean", pooler=None),),
        masks=(full(),),
        init_std=0.1,
        dropout_rate=0.1,
    ),
    data=Digits(),
    objective=ClassCrossEntropy(label_smoothing=0.1, augment=(Move(degrees=5.0, pixels=0.5),)),
    optimizer=AdamW(learning_rate=2e-3, b2=0.98),
    schedule=Cosine(warmup=100),
    steps=800,
    batch_size=64,
    log_every=100,
    eval_every=200,
)
