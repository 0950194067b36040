"""A folder with a tiny experiment and its text: where the tests of commands and of whole runs
work."""

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
EXPERIMENT = """
from jaxformer.data.sources import Text
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.training import Checkpoints, Experiment, Sample
experiment = Experiment(
    name="tiny",
    model=ModelConfig(vocab_size=256, num_layers=1, d_model=16, num_heads=2, context_length=16),
    data=Text(path="text.txt"), steps=6, batch_size=4, log_every=2, eval_every=3,
    checkpoints=Checkpoints(every=2), sample=Sample(prompt="the ", tokens=8),
)
"""


def furnish(folder, experiment=EXPERIMENT):
    """Writes the experiment and the text; returns the folder."""
    (folder / "experiments").mkdir()
    (folder / "experiments" / "tiny.py").write_text(experiment)
    (folder / "text.txt").write_text(TEXT)
    return folder
