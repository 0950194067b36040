# %% [markdown]
# # Masks
#
# Which keys a query may see is a small value, not a matrix. It prints as the calls that made it,
# combines with `&`, `|` and `~`, and every kernel reads it. An array of all pairs exists only where
# somebody asks for it, as here, to look.

# %%
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jaxformer import masks, ops

LENGTH = 2048  # of what is timed
DRAWS = 3  # timings of each kernel; the best counts


def text(mask, length=12):
    dense = np.asarray(mask.dense(length, length))[0, 0]
    return "\n".join(" ".join("#" if visible else "." for visible in row) for row in dense)


mask = masks.causal() & masks.window(3)
print(mask)
print(text(mask))

# %% [markdown]
# ## Build and combine
#
# A row is a query, a column a key. `causal() | prefix(4)` is a prefix language model;
# `window(2, 2) | global_tokens(1)` is Longformer's; `by_head` gives each head its own.

# %%
kinds = {
    "causal": masks.causal(),
    "causal & window": masks.causal() & masks.window(8),
    "prefix language model": masks.causal() | masks.prefix(8),
    "Longformer": masks.longformer(8, 2),
    "BigBird": masks.bigbird(block=4, globals=1, random=2),
    "sparse transformer, strided": masks.sparse_transformer_strided(8),
    "sparse transformer, fixed": masks.sparse_transformer_fixed(8, 2),
    "dilated window": masks.window(4, 4, dilation=3),
}


def panels(pictures, colors, columns=4):
    """Small pictures side by side."""
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, picture) in zip(grid, pictures.items(), strict=False):
        axes.imshow(picture, cmap=ListedColormap(colors), vmin=0, vmax=len(colors) - 1)
        axes.set_title(title, fontsize=8)
        axes.set(xticks=[], yticks=[])
    return figure


T = 48
panels({name: mask.dense(T, T)[0, 0] for name, mask in kinds.items()}, ["#ffffff", "#1f5d8c"])

# %% [markdown]
# A rule of your own is a function of positions. It is a mask like the others: it combines, and
# kernels evaluate it block by block.

# %%
checkers = masks.Mask(lambda mask, q, kv: (q // 6 + kv // 6) % 2 == 0)
pictures = {
    "your rule": checkers,
    "your rule & causal": checkers & masks.causal(),
    "~your rule": ~checkers,
}
dense = {name: mask.dense(T, T)[0, 0] for name, mask in pictures.items()}
panels(dense, ["#ffffff", "#1f5d8c"], columns=3)

# %% [markdown]
# ## What kernels see
#
# A kernel works on blocks of pairs. `mask.blocks(T, S, block)` says of each block whether it is
# empty (0: skipped), partial (1: computed and masked) or full (2: computed, no mask needed). That
# is decided by the rule, in NumPy, while the program is traced: no pair is looked at where the rule
# is known.

# %%
print(masks.longformer(512, 64).blocks(2048, 2048, 256))
blocks = {name: mask.blocks(T, T, 4) for name, mask in kinds.items()}
panels(blocks, ["#ffffff", "#9cc3e0", "#1f5d8c"])

# %% [markdown]
# So what attention costs follows the mask: the pairs that are visible, and the blocks that are not
# empty.

# %%
length, block = 8192, 512
print(f"{'mask':<46} pairs visible  blocks computed")
near = masks.causal() & masks.window(1024)
for mask in (masks.full(), masks.causal(), near, masks.longformer(512, 16)):
    computed = np.mean(mask.blocks(length, length, block) > 0)
    print(f"{mask!s:<46} {mask.density(length, length):>12.1%} {computed:>16.1%}")

# %% [markdown]
# ## The same values, less work
#
# The blockwise kernel gives what the reference gives, which makes the whole matrix. In a window it
# is faster by what it skips.

# %%
shape = (1, LENGTH, 4, 32)  # [B, T, N, H]
q, k, v = (jax.random.normal(jax.random.key(i), shape) for i in range(3))


def timed(mask, implementation):
    """(milliseconds, values)"""
    attend = jax.jit(partial(ops.attention, mask=mask, implementation=implementation))
    out, times = jax.block_until_ready(attend(q, k, v)), []
    for _ in range(DRAWS):
        start = time.perf_counter()
        jax.block_until_ready(attend(q, k, v))
        times.append(time.perf_counter() - start)
    return 1000 * min(times), out


for mask in (masks.causal(), masks.causal() & masks.window(128)):
    slow, expected = timed(mask, "reference")
    fast, found = timed(mask, "blockwise")
    times = f"reference {slow:.0f} ms, blockwise {fast:.0f} ms"
    print(f"{mask}: {times}, largest difference {np.abs(found - expected).max():.1e}")

# %% [markdown]
# ## Padding and packing
#
# Masks may hold arrays, one row of a batch each: lengths of padded rows, or segments of rows in
# which several texts are packed. `.at(offset)` says where the first query stands, as in decoding;
# without it the last query stands at the last key.

# %%
texts = jnp.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0]])  # 0: padding
packed = masks.causal() & masks.segments(texts)
print(text(packed))
visible = masks.causal().dense(2, 12)[0, 0].sum(axis=1)
print("two queries after ten keys:", visible, "keys are visible")
