"""Ways to run the layers: one scan (the default), stages of a pipeline, or a stack of your own."""

from jaxformer.models.stacks.scan import layer_functions as layer_functions
from jaxformer.models.stacks.trees import LayerRun as LayerRun, join_layers as join_layers
