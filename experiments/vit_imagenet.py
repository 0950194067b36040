"""ViT-S/16 on ImageNet-1k, 90 epochs: "Better plain ViT baselines for ImageNet-1k".

Beyer et al. 2022, arXiv:2205.01580. The model is that of Dosovitskiy et al. 2020, arXiv:2010.11929,
without a class token: the mean of the patches is classified. The paper's recipe: batches of 1024, a
rate of 1e-3 after 10,000 steps, then a cosine, weight decay, Inception crops, flips. The paper also
has RandAugment, Mixup and fixed sinusoidal positions, and crops the original picture; here the
picture is first scaled and cut to 224 x 224.
Expected: the paper has an accuracy of 76.5 % on validation; this should be a little below.
NOT RUN by us: we do not have ImageNet. A test runs two steps of a small version on a folder of
generated images.
Time: not measured. Needs pip install 'jaxformer[vision]'.
Data: the folders imagenet/train and imagenet/val, or --data.train=DIR and --data.validation=DIR.
Each has a folder of JPEG files for each class. --data.bad-rows=skip leaves out files that cannot be
read.
Command: make train EXP=vit_imagenet ARGS="--mesh.data=-1"
"""

from dataclasses import replace

from jaxformer.data.augment import Flip, ResizedCrop
from jaxformer.data.images import Images
from jaxformer.models import Classification, Patches
from jaxformer.models.presets import vit_small
from jaxformer.training import AdamW, Checkpoints, ClassCrossEntropy, Cosine, Experiment

patches = Patches(image=(224, 224), patch=(16, 16), class_token=False)
head = Classification(1000, pool="mean", pooler=None)

experiment = Experiment(
    name="vit_imagenet",
    model=replace(vit_small, embedding=patches, context_length=patches.length, heads=(head,)),
    data=Images(train="imagenet/train", validation="imagenet/val", values=(-1.0, 1.0)),
    objective=ClassCrossEntropy(augment=(ResizedCrop(area=(0.05, 1.0)), Flip())),
    optimizer=AdamW(learning_rate=1e-3, b2=0.999, weight_decay=0.1),
    schedule=Cosine(warmup=10_000, final=0.0),
    steps=112_600,
    batch_size=1024,
    precision="bfloat16",
    log_every=100,
    eval_every=5000,
    checkpoints=Checkpoints(every=2500, best="-accuracy"),
)
