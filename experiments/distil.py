"""A third of the parameters, taught by the quickstart model: distillation on the same text.

The student has two layers of width 96, the teacher (the run of quickstart) four of width 128. The
student's loss is half the cross entropy of the next byte, half the divergence from the teacher's
distribution (Hinton et al. 2015). With `--objective.share=0` it learns from the text alone.

Expected: a validation loss of 1.546 nats a byte with 246,240 parameters, 1.613 from the text
alone; the teacher has 1.536 and 820,352 parameters (seed 0, Python 3.13's library).
Time: 5 minutes of one CPU core each; quickstart takes as long.
Command: make train EXP=quickstart, then make train EXP=distil
    make train EXP=distil ARGS="--objective.share=0 --name=distil_alone"
"""

from dataclasses import replace

from experiments.quickstart import experiment as teacher
from jaxformer.objectives import Distillation, forward_kl
from jaxformer.training import Reference

experiment = replace(
    teacher,
    name="distil",
    model=replace(teacher.model, num_layers=2, d_model=96, num_heads=3),
    objective=Distillation(forward_kl, temperature=1.0, share=0.5, teacher=teacher.model),
    references={"teacher": Reference("quickstart", model=teacher.model)},
)
