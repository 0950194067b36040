# %% [markdown]
# # Reversal, and the anti-diagonal
#
# The smallest task that needs attention: read four tokens, say them backwards. Output `t` must copy
# input `T - 1 - t`, so the attention map of a model that has learned it should be dark except on
# the anti-diagonal. This page trains such a model by hand, with `jax` and `optax` alone, and looks.
# `make train EXP=reverse` trains the same model as an experiment.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer import masks, models, ops
from jaxformer.data.tasks import Reverse
from jaxformer.tools.analysis import attention_maps, figures

STEPS = 2000
V, T, B = 8, 4, 10

# %% [markdown]
# The data: 50 random sequences, and what their reversal is. An example is a function of
# (seed, split, index).

# %%
data = Reverse(vocab_size=V, length=T, examples=50, form="aligned")
model = models.ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=64,
    num_heads=4,
    d_ff=128,
    context_length=T,
    feedforward="relu",
    block=models.blocks.post_norm,
    positions=models.Sinusoidal(),
    masks=(masks.full(),),  # every token sees every token
    tie_embeddings=False,
)
train = data.open(model).train
rows = [train[i] for i in range(len(train))]
tokens = jnp.stack([row["tokens"] for row in rows])  # [50, T]
labels = jnp.stack([row["labels"] for row in rows])
print("tokens", tokens[0], "labels", labels[0])

# %% [markdown]
# The parameters are a nested dict, made from one declaration for each.

# %%
params = models.init(model, jax.random.key(0))
for path, leaf in jax.tree_util.tree_leaves_with_path(params)[:5]:
    print(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
print("in all", sum(leaf.size for leaf in jax.tree.leaves(params)))

# %% [markdown]
# The loss is the mean of `-log p(label)`, and a step is one gradient of it. An untrained model says
# all eight tokens with about the same probability: its loss is ln 8 = 2.079.


# %%
def loss(params, tokens, labels):
    logits = models.apply(model, params, tokens).logits  # [B, T, V]
    total, weight = ops.cross_entropy(logits, labels)[:2]
    return total / weight


optimizer = optax.adam(1e-3)


@jax.jit
def step(params, state, tokens, labels):
    value, gradients = jax.value_and_grad(loss)(params, tokens, labels)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


state, losses, rng = optimizer.init(params), [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.choice(len(tokens), B, replace=False)
    params, state, value = step(params, state, tokens[batch], labels[batch])
    losses.append(float(value))
print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.1e} at the last")
figures.losses({"reversal": [{"step": i, "loss": value} for i, value in enumerate(losses)]})

# %% [markdown]
# Has it learned to reverse, or learned 50 rows by heart? All 4096 sequences of four tokens tell.

# %%
everything = jnp.stack(jnp.meshgrid(*[jnp.arange(V)] * T, indexing="ij"), axis=-1).reshape(-1, T)
seen = (everything[:, None] == tokens[None]).all(-1).any(-1)
right = (models.apply(model, params, everything).logits.argmax(-1) == everything[:, ::-1]).all(-1)
others = f"{right[~seen].mean():.1%} of the {(~seen).sum()} others"
print(f"right: {right[seen].mean():.1%} of the sequences it saw, {others}")

# %% [markdown]
# ## Where it looks
#
# One name asks for the attention maps (see [Looking inside a model](../looking-inside.md)). Rows
# are queries, columns are keys.

# %%
name = "layers/*/attention/weights"
output = models.apply(model, params, tokens, intermediates=(name,))
weights = output.intermediates[name]  # [L, B, N, T, S]
queries, keys = [f"output {t}" for t in range(T)], [str(token) for token in tokens[0]]
figures.attention(np.asarray(weights[:, 0]), queries, keys)

# %% [markdown]
# How much of each head's weight lies on the anti-diagonal, as a mean over all rows and queries; a
# head that looks everywhere has 1 / T = 0.25. The entropy says the same: 0 for one key,
# ln 4 = 1.386 for all of them.

# %%
mirror = jnp.broadcast_to(jnp.arange(T)[::-1], tokens.shape)  # [B, T]: where query t should look
on_it = attention_maps.head_means(attention_maps.weight_at(weights, mirror))  # [L, N]
entropy = attention_maps.head_means(attention_maps.entropy(weights))
for head in range(model.num_heads):
    share = f"{on_it[0, head]:.2f} of its weight on the anti-diagonal"
    print(f"head {head}: {share}, entropy {entropy[0, head]:.2f} nats")
