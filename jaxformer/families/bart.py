"""BART, mBART and Pegasus: Marian with other positions, and norms in other places.

BART: Lewis et al. 2020, arXiv:1910.13461. mBART: Liu et al. 2020, arXiv:2001.08210. Pegasus: Zhang
et al. 2020, arXiv:1912.08777.

Two classes are refused. ForSequenceClassification reads the position of the last end token of the
source, which heads do not see. ForCausalLM is only the decoder, but its file also has the maps of
the attention to a source.
"""

import jax.numpy as jnp
import numpy as np

from jaxformer.families.classes import SPAN
from jaxformer.families.marian import TRANSLATOR, Pair, pair_family
from jaxformer.models.config import EncoderDecoder, Learned
from jaxformer.models.position_table import table_of


def sines(config: EncoderDecoder) -> dict[str, np.ndarray]:
    """The sinusoids of both stacks, which files of Pegasus have."""
    tables = {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        table = table_of(stack, stack.positions)
        if table is not None:
            vectors = table.apply({}, jnp.arange(stack.context_length)[None])[0]
            tables[f"model.{name}.embed_positions.weight"] = np.asarray(vectors)
    return tables


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
