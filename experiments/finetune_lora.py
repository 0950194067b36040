r"""Fine-tuning with LoRA: Hu et al. 2021, arXiv:2106.09685.

Low-rank factors train beside the frozen weights of a run. It needs --initial: a run (its folder,
its name in runs/, or its experiment's name for the newest), or the folder or name of Hugging Face
weights. For these, --model is the preset of the same size, and --data your text with their
tokenizer:

    ARGS="--initial gpt2 --model gpt2_small --data \"Corpus('my.txt', tokenizer='gpt2')\""

With --adaptation "Lora(stored=NF4())" the frozen matrices take 4 bits (docs/small-devices.md).

Expected: at the end a validation loss below that of the starting run.
Time: seconds on two CPU cores.
Command: make train, then make train EXP=finetune_lora ARGS="--initial=quickstart"
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
