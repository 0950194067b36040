# %% [markdown]
# # Scaling laws
#
# How much does the loss fall with more parameters N and more tokens D? Hoffmann et al. 2022
# (arXiv:2203.15556, equation 2) fit
#
# L(N, D) = E + A / N^α + B / D^β
#
# to many runs. `make scaling EXP=quickstart` trains such a grid and fits it. Here the losses are
# given, so that the fit itself can be looked at.

# %%
import numpy as np
from matplotlib.figure import Figure

from jaxformer.tools.analysis import figures, scaling

DRAWS = 200  # fits of the bootstrap

# %% [markdown]
# ## Does the fit find a law that is known?
#
# Losses of Hoffmann's own law for 6 sizes and 6 lengths, with noise of 0.1 %, as the seed of a run
# makes it.

# %%
truth = scaling.HOFFMANN
grid = np.meshgrid(np.geomspace(1e7, 1e10, 6), np.geomspace(2e8, 2e11, 6))
N, D = (axis.ravel() for axis in grid)
losses = truth.loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 1e-3, N.size))
law = scaling.fit(losses, N, D)
ranges = scaling.intervals(law, losses, N, D, draws=DRAWS)
print("constant      truth        fit  95 % interval")
for name in law._fields:
    low, high = getattr(ranges, name)
    exact, fitted = getattr(truth, name), getattr(law, name)
    print(f"{name:<8} {exact:>10.4g} {fitted:>10.4g}  {low:.4g} to {high:.4g}")
figures.scaling_law(law, losses, N, D)

# %% [markdown]
# Every exponent is within 0.01 of the truth. A and B are known much less well: an error of α is
# paid back by A, because all N are far from 1.
#
# ## The best model of a budget
#
# Training costs about 6 N D FLOPs. For a budget C the law says which N and D give the least loss:
# N grows as C^(β/(α+β)).

# %%
print("FLOPs      parameters       tokens  tokens a parameter   loss")
for flops in (1e18, 1e20, 1e22, 1e24):
    size, tokens = law.optimum(flops)
    loss = law.loss(size, tokens)
    print(f"{flops:.0e} {size:>14.3g} {tokens:>12.3g} {tokens / size:>15.0f} {loss:>11.3f}")

# %% [markdown]
# The same without a law for D: IsoFLOP curves (section 3.2). At each budget train several sizes,
# each with the D that is left, and take the lowest point of a parabola in log N. The slope of the
# lowest points is the exponent.

# %%
levels = (1e18, 1e19, 1e20, 1e21)
budgets = np.repeat(levels, 7)
sizes = np.concatenate([law.optimum(c)[0] * np.geomspace(1 / 3, 3, 7) for c in levels])
noise = np.random.default_rng(1).normal(0, 2e-4, sizes.size)
seen = truth.loss(sizes, budgets / 6 / sizes) * np.exp(noise)
found = scaling.isoflop(budgets, sizes, seen)
exact = truth.beta / (truth.alpha + truth.beta)
by_curves, by_law = f"C^{found.exponent:.3f}", f"C^{exact:.3f}"
print(f"N grows as {by_curves} by the curves, as {by_law} by the law they are drawn from")

axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
for color, flops in zip(figures.COLORS, found.flops, strict=False):
    rows = budgets == flops
    curve = np.polyfit(np.log(sizes[rows]), seen[rows], 2)
    line = np.geomspace(sizes[rows].min(), sizes[rows].max(), 50)
    axes.plot(sizes[rows], seen[rows], "o", color=color, label=f"{flops:.0e} FLOPs")
    axes.plot(line, np.polyval(curve, np.log(line)), color=color, linewidth=1)
axes.plot(found.parameters, found.losses, "k*--", linewidth=1, label="lowest points")
axes.set(xscale="log", xlabel="parameters N", ylabel="loss (nats per token)")
axes.legend(frameon=False, fontsize=7)
axes.get_figure()

# %% [markdown]
# ## Nine small runs
#
# These losses are real: `quickstart` with d = 16, 32 and 64 for 60, 120 and 240 steps
# (`make scaling EXP=quickstart`, seed 0, two CPU cores). The curves go through the points, and yet
# the intervals are wide, and E comes out as 0: runs so small and short say nothing about the
# entropy of the text.

# %%
N = np.repeat([12432, 49440, 197184], 3)  # without the tables of tokens
D = np.tile([122880, 245760, 491520], 3)
# the losses in nats a byte
losses = np.array([3.8027, 3.3216, 3.0070, 3.2731, 2.9093, 2.5784, 2.8398, 2.5618, 2.2351])
law = scaling.fit(losses, N, D)
ranges = scaling.intervals(law, losses, N, D, draws=DRAWS)
for name in law._fields:
    low, high = getattr(ranges, name)
    print(f"{name:<6} {getattr(law, name):>10.4g}  {low:.4g} to {high:.4g}")
figures.scaling_law(law, losses, N, D)
