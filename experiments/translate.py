"""Translation with the Transformer of 2017, in a size for two CPU cores.

Vaswani et al. 2017, arXiv:1706.03762: a shared byte-pair vocabulary, the schedule of 2017 (Noam),
label smoothing 0.1, beams of 4 with alpha 0.6, the mean of the last checkpoints. The layers are
pre-norm, which needs no long warm-up.
Data: two files of lines for each split, such as Multi30k's train.de and train.en (Elliott et al.
2016). For other languages use --data.source and --data.target.
Expected: BLEU 40.7 on Multi30k's validation (1,014 pairs, case-sensitive, 13a) with the mean of the
last five checkpoints; with single checkpoints 29.9, 36.3, 39.7, 39.6 after 450, 900, 1350, 1800
steps (seed 0).
Time: 37 minutes on two CPU cores that also did other work (58 minutes of CPU time), of which four
are evaluations.

Command: make train EXP=translate ARGS="--data.train=multi30k/train --data.validation=multi30k/val"
   then: make evaluate EXP=translate ARGS="--average 5"
         make generate EXP=translate ARGS="--prompt 'Ein Hund läuft.' --average 5"
The paper's base size on an accelerator (not run by us): --model transformer_base
--data.vocab-size=37000 --batch-size=96 --schedule "Noam(warmup=4000)" --steps=100000
--precision=bfloat16, with --data.bad-rows=skip for WMT
"""

from dataclasses import replace

from jaxformer.data.pairs import Pairs
from jaxformer.decoding import Beams
from jaxformer.decoding.beam import gnmt
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import bleu, chrf
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.presets import transformer_2017
from jaxformer.training import Adam, Checkpoints, Experiment, Noam, Sample, TokenCrossEntropy


def small(stack: ModelConfig) -> ModelConfig:
    """The stack in the size of this experiment, pre-norm."""
    return replace(stack, num_layers=3, context_length=80, block=None)


paper = transformer_2017(d_model=256, d_ff=512, num_heads=4, vocab_size=4000)
beams = Beams(4, length_penalty=gnmt(0.6))

experiment = Experiment(
    name="translate",
    model=EncoderDecoder(small(paper.encoder), small(paper.decoder)),
    data=Pairs(train="train", validation="val", source="de", target="en", vocab_size=4000),
    objective=TokenCrossEntropy(label_smoothing=0.1),
    optimizer=Adam(b2=0.98, eps=1e-9),
    schedule=Noam(warmup=400, factor=0.8),
    steps=1800,
    batch_size=32,
    eval_every=450,
    metrics=(Generated((bleu, chrf), beams, max_tokens=80, only_final=False),),
    checkpoints=Checkpoints(every=90, keep_latest=8),
    sample=Sample(tokens=80, sampling=beams),
)
