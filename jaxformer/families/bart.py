"""BART, mBART and Pegasus: Marian with other positions, and norms in other places.

BART: Lewis et al. 2020, arXiv:1910.13461. mBART: Liu et al. 2020, arXiv:2001.08210. Pegasus: Zhang
et al. 2020, arXiv:1912.08777.

Two classes are refused. ForSequenceClassification reads the position of the last end token of the
source, which heads do not see. ForCausalLM is only the decoder, but its file also has the maps of
the attention to a source.
"""

from jaxformer.families.classes import SPAN
from jaxformer.families.marian import TRANSLATOR, Pair, pair_family, sines
from jaxformer.models.config import Learned

KINDS = {"ForConditionalGeneration": TRANSLATOR, "Model": ()}
TASKS = {"ForQuestionAnswering": (SPAN,)}
POSITIONS = Learned(offset=2)

BART = Pair("Bart", KINDS | TASKS, positions=POSITIONS, embedding_norm=True)
MBART = Pair(
    "MBart",
    KINDS | TASKS,
    positions=POSITIONS,
    block=None,
    embedding_norm=True,
    needs_start=False,  # the target begins with the token of its language
)
PEGASUS = Pair("Pegasus", KINDS, block=None)
FAMILIES = {
    "bart": pair_family(BART),
    "mbart": pair_family(MBART),
    "pegasus": pair_family(PEGASUS)._replace(computed=sines),
}
