# %% [markdown]
# # Attention over three tokens, worked step by step
#
# Three tokens of width 2, one head. Forward, then backward. Each matrix is computed by its formula
# in NumPy (float64), and by the function of the library that models use; the two are compared.
#
# Run it as a script, `python docs/notebooks/worked_example.py`, or cell by cell in an editor that
# knows `# %%`. It takes a few seconds, prints every matrix, and as a script draws the attention
# maps into `worked_example.png`.
#
# The numbers are those of section 7 of "Mathematical Foundations of Transformer Models", corrected:
# the printed example has a wrong entry in Q, in K and in V, and nearly all that follows from them.

# %%
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import masks, ops
from jaxformer.tools.analysis import attention_maps

Z = np.array([[1.0, 0.5], [2.0, 1.0], [0.5, 2.0]])  # [T, D]
W_QUERY = np.array([[0.5, 0.3], [0.2, 0.4]])  # [D, H]
W_KEY = np.array([[0.3, 0.1], [0.4, 0.2]])
W_VALUE = np.array([[0.2, 0.5], [0.3, 0.1]])
ROOT = np.sqrt(2)  # of H


def show(name, by_hand, by_library):
    """Prints a matrix; raises AssertionError where the library has another one."""
    # float32 rounding of numbers below 2
    np.testing.assert_allclose(by_library, by_hand, atol=1e-6)
    print(name)
    style = dict(precision=6, suppress_small=True, floatmode="fixed", prefix="  ")
    print("  " + np.array2string(np.asarray(by_hand), **style))


# %% [markdown]
# ## Queries, keys, values
#
#     Q = Z Wq      K = Z Wk      V = Z Wv
#
# The library's arrays are `[B, T, N, H]`: here one row and one head.

# %%
Q, K, V = Z @ W_QUERY, Z @ W_KEY, Z @ W_VALUE
x = jnp.asarray(Z, jnp.float32)[None]
matrices = [jnp.asarray(W, jnp.float32)[:, None] for W in (W_QUERY, W_KEY, W_VALUE)]
query, key, value = (ops.einsum("btd,dnh->btnh", x, W) for W in matrices)
for name, ours, theirs in (("Q", Q, query), ("K", K, key), ("V", V, value)):
    show(name, ours, theirs[0, :, 0])

# %% [markdown]
# ## Scores
#
#     S = Q K^T / sqrt(H)
#
# Token 1 is twice token 0, so its scores are twice those of token 0.

# %%
S = Q @ K.T / ROOT
show("S", S, ops.einsum("btnh,bsnh->bnts", query, key)[0, 0] / ROOT)

# %% [markdown]
# ## Weights
#
#     A = exp(S) / rowsum(exp(S))
#
# In each row the weights sum to 1. Twice the scores make a sharper row: its entropy is lower.

# %%
exponentials = np.exp(S)
A = exponentials / exponentials.sum(axis=1, keepdims=True)
out, weights = ops.attention(query, key, value, return_weights=True)
print("exp(S), row 0:", exponentials[0].round(6), "sum", exponentials[0].sum().round(6))
show("A", A, weights[0, 0])
entropy = -(A * np.log(A)).sum(axis=1)
show("entropy of each row, nats", entropy, attention_maps.entropy(weights)[0, 0])

# %% [markdown]
# ## Output
#
#     O = A V
#
# Token 0 reads 27.4 % of itself, 36.4 % of token 1 and 36.2 % of token 2.

# %%
O = A @ V
show("O", O, out[0, :, 0])

# %% [markdown]
# ## With a causal mask
#
# What a token may not see has a score of -inf, and so a weight of 0. Row 2 sees everything and
# stays as it was.

# %%
hidden = np.where(np.tri(3, dtype=bool), S, -np.inf)
causal = np.exp(hidden) / np.exp(hidden).sum(axis=1, keepdims=True)
masked = ops.attention(query, key, value, mask=masks.causal(), return_weights=True)[1]
show("A, causal", causal, masked[0, 0])

# %% [markdown]
# ## The gradient
#
# Let the loss be sum(O * C) with a fixed C. Then its gradient with respect to O is C.
#
#     dV = A^T dO
#     dA = dO V^T
#     dS = A * (dA - rowsum(dA * A))      the Jacobian of the softmax; each row sums to 0
#     dQ = dS K / sqrt(H)
#     dK = dS^T Q / sqrt(H)

# %%
dO = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
dV = A.T @ dO
dA = dO @ V.T
delta = (dA * A).sum(axis=1, keepdims=True)
dS = A * (dA - delta)
dQ, dK = dS @ K / ROOT, dS.T @ Q / ROOT


def attend(query, key, value, bias):
    return ops.attention(query, key, value, bias=bias)


zero = jnp.zeros((1, 1, 3, 3))
cotangent = jnp.asarray(dO, jnp.float32)[None, :, None]
pull_back = jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](cotangent))
pulled_back = pull_back(query, key, value, zero)
for name, ours, theirs in zip(("dQ", "dK", "dV"), (dQ, dK, dV), pulled_back, strict=False):
    show(name, ours, theirs[0, :, 0])
show("dS", dS, pulled_back[3][0, 0])
show("rowsum(dA * A) = rowsum(dO * O)", delta[:, 0], (dO * O).sum(axis=1))

# %% [markdown]
# ## Back to the parameters
#
#     dWq = Z^T dQ      dWk = Z^T dK      dWv = Z^T dV
#     dZ  = dQ Wq^T + dK Wk^T + dV Wv^T
#
# All three read the same tokens, so their gradients add up.

# %%
dW_query, dW_key, dW_value = Z.T @ dQ, Z.T @ dK, Z.T @ dV
dZ = dQ @ W_QUERY.T + dK @ W_KEY.T + dV @ W_VALUE.T


def loss(z, *matrices):
    heads = (ops.einsum("btd,dnh->btnh", z[None], W[:, None]) for W in matrices)
    return jnp.sum(ops.attention(*heads) * cotangent)


inputs = [jnp.asarray(array, jnp.float32) for array in (Z, W_QUERY, W_KEY, W_VALUE)]
gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
by_hand = {"dZ": dZ, "dWq": dW_query, "dWk": dW_key, "dWv": dW_value}
for (name, ours), theirs in zip(by_hand.items(), gradients, strict=True):
    show(name, ours, theirs)

# %% [markdown]
# ## A witness without calculus
#
# Central differences: change one number of Wq a little in both directions, and look at the loss.


# %%
def loss_by_hand(matrix):
    scores = (Z @ matrix) @ K.T / ROOT
    rows = np.exp(scores)
    return ((rows / rows.sum(axis=1, keepdims=True) @ V) * dO).sum()


step, differences = 1e-6, np.zeros((2, 2))
for place in np.ndindex(2, 2):
    change = np.zeros((2, 2))
    change[place] = step
    difference = loss_by_hand(W_QUERY + change) - loss_by_hand(W_QUERY - change)
    differences[place] = difference / (2 * step)
show("dWq by differences", differences, dW_query)

# %% [markdown]
# ## A picture
#
# Rows are queries, columns are keys.


# %%
def draw():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    panels = {"weights A": A, "weights, causal": causal, "gradient of the scores dS": dS}
    for axes, (title, matrix) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        signed = matrix.min() < 0
        most = np.abs(matrix).max() if signed else 1.0
        style = dict(cmap="RdBu_r", vmin=-most) if signed else dict(cmap="Blues", vmin=0)
        axes.imshow(matrix, vmax=most, **style)
        for (i, j), number in np.ndenumerate(matrix):
            color = "white" if abs(number) > 0.65 * most else "black"
            axes.text(j, i, f"{number:.3f}", ha="center", va="center", color=color, fontsize=9)
        axes.set(title=title, xlabel="key", xticks=range(3), yticks=range(3))
    figure.axes[0].set_ylabel("query")
    return figure


if __name__ == "__main__":
    draw().savefig("worked_example.png")
draw()
