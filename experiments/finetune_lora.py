"""Fine-tuning with LoRA: Hu et al. 2021, arXiv:2106.09685. Low-rank factors train beside the frozen weights of a run.

Expected: the starting model's validation loss at step 0, below it at the end. Time: seconds on two CPU cores.
Command: make train, then make train EXP=finetune_lora ARGS="--initial=runs/quickstart-..."; for weights of Hugging Face give
their folder or name, and --model the preset of the same sizes: ARGS="--model gpt2_small --initial gpt2 ...".
"""

from dataclasses import replace

from experiments.quickstart import experiment as quickstart
from jaxformer.models.adaptation import Lora
from jaxformer.training import Adam, Constant

experiment = replace(
    quickstart,
    name="finetune_lora",
    adaptation=Lora(pattern="(query|value)/kernel$", rank=8, alpha=16.0),
    optimizer=Adam(learning_rate=1e-3),
    schedule=Constant(warmup=10),
    steps=100,
    eval_every=50,
)
