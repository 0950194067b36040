"""ALBERT: narrow tables of the vocabulary, and layers that share their parameters.

Lan et al. 2019, arXiv:1909.11942, section 3.1.
"""

from dataclasses import dataclass, replace

import jax
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int

from jaxformer import params
from jaxformer.errors import ConfigError, check_whole
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.checks import require_numbers
from jaxformer.models.config import Classification, LanguageModel, ModelConfig
from jaxformer.models.embedding import look_up
from jaxformer.models.layer import Context, Embedder, LayerOutput, Layers, Tree, linear
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.presets import sized
from jaxformer.models.stacks import join_layers, layer_functions
from jaxformer.ops.positions import learned
from jaxformer.params import Spec
from jaxformer.zoo.projection import Projection


@dataclass(frozen=True)
class Factorised:
    """Tables of `width` features, a norm, and a linear map to the width of the layers.

    V W + W D numbers in place of V D: Lan et al. 2019, section 3.1. The tables of token types and
    of positions have W features, too. ELECTRA's small models and generators have it. The config's
    dropout follows the map; in the published code it stands before the map.
    """

    width: int = 128  # W
    token_types: int = 0  # number of segment types; the vector of each is added

    __post_init__ = require_numbers(width=1, token_types=0)

    def __call__(self, config: ModelConfig) -> Embedder:
        W = self.width
        start = normal(config.std)
        spec: Tree = {
            "tokens": Spec((config.vocab_size, W), ("vocab", "rank"), start),
            "norm": norm_spec(config, W),
            "projection": params.linear((W, config.d_model), ("rank", "embed"), ("rank",), start),
        }
        if self.token_types:
            spec["token_types"] = Spec((self.token_types, W), (None, "rank"), start)

        def apply(
            tree: Tree, tokens: Int[Array, "B T"], inputs: Tree, context: Context
        ) -> Float[Array, "B T W"]:
            x = look_up(tree["tokens"], tokens)
            if self.token_types:
                types = 0 * tokens if context.token_types is None else context.token_types
                x = x + learned(types, tree["token_types"])
            return x

        def end(tree: Tree, x: Float[Array, "B T W"], context: Context) -> Float[Array, "B T D"]:
            normed = norm(config, tree.get("norm", {}), x)
            return linear("btr,rd->btd", normed, tree["projection"])

        return Embedder(spec, apply, width=W, end=end)


@dataclass(frozen=True)
class Repeated:
    """A stack that runs each group of layers several times, one group after the other.

    `ModelConfig.num_layers` counts the layers that have parameters; they are cut into
    `len(times)` groups of equal size. ALBERT has one group of one layer: Lan et al. 2019,
    section 3.1. Dropout is drawn anew each time. A cache, intermediates and variables are refused
    where a layer runs more than once.
    """

    times: tuple[int, ...]  # how often each group runs

    def __post_init__(self):
        if not (isinstance(self.times, tuple) and self.times):
            raise ConfigError(f"Repeated.times={self.times}: expected a tuple, such as (12,)")
        for count in self.times:
            check_whole("Repeated.times", count, least=0)

    def layer_runs(self, config: ModelConfig) -> int:
        """The number of layers that a token runs through, for `models.cost`."""
        return sum(self.times) * config.num_layers // len(self.times)

    def __call__(
        self, config: ModelConfig, layers: Layers, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], LayerOutput]:
        size, rest = divmod(config.num_layers, len(self.times))
        if rest:
            raise ConfigError(
                f"model.stack: {len(self.times)} groups of model.num_layers={config.num_layers}: "
                "expected a multiple of the groups"
            )
        runs = []
        carry = None
        for group, count in enumerate(self.times):
            for time in range(count):
                context_of_time = context
                if context.dropout_key is not None:
                    key = jax.random.fold_in(context.dropout_key, time)
                    context_of_time = replace(context, dropout_key=key)
                functions = layer_functions(config, layers, x, context_of_time)
                for function in functions[group * size : (group + 1) * size]:
                    run = function(x, carry)
                    runs.append(run)
                    x, carry = run.hidden, run.carry
        return x, join_layers(runs)


# Lan et al. 2019, table 1, in the second version of the published weights (no dropout), with the
# head of the masked tokens and the head of the order of sentences
albert_base = ModelConfig(
    vocab_size=30_000,
    num_layers=1,
    d_model=768,
    num_heads=12,
    context_length=512,
    feedforward="gelu_tanh",
    norm_eps=1e-12,
    block=post_norm,
    masks=(full(),),
    stack=Repeated((12,)),
    embedding=Factorised(128, token_types=2),
    heads=(
        LanguageModel(Projection("gelu_tanh", 128), bias=True),
        Classification(2, pool="position_0", name="sentence_order"),
    ),
)
albert_large = sized(albert_base, 1, 1024, 16, stack=Repeated((24,)))
albert_xlarge = sized(albert_base, 1, 2048, 16, stack=Repeated((24,)))
albert_xxlarge = sized(albert_base, 1, 4096, 64)
