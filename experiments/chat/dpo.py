"""The model of chat/sft learns to prefer right answers to answers with one wrong letter.

Rafailov et al. 2023, arXiv:2305.18290. The model before training is the reference.
`--adaptation "Lora(rank=8)" --references '{"reference": Base()}'` trains factors alone, which share
the reference's weights.
Expected: EXPECTED_DPO
Time: TIME_DPO
Command: make train EXP=chat/dpo, after chat/sft
"""

from dataclasses import replace

from experiments.chat._tasks import Choices
from experiments.chat.sft import experiment as sft
from jaxformer.objectives import DPO, Preference
from jaxformer.training import AdamW

experiment = replace(
    sft,
    name="chat_dpo",
    initial="chat_sft",
    references={"reference": "chat_sft"},
    data=Choices(),
    objective=Preference(DPO(beta=0.1)),
    optimizer=AdamW(learning_rate=1e-4, weight_decay=0.0),
    steps=200,
    batch_size=16,
    eval_every=100,
)
