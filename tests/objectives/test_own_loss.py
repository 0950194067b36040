"""Every objective learns what the model itself asks for: the balance of its experts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.models import Mixture
from jaxformer.objectives import DPO, PolicyGradient, Preference, RewardModel, StepContext
from tests.objectives import test_policy, test_preference, test_reward

B, T = test_reward.B, test_reward.T


def texts():
    return test_reward.batch(test_reward.rng.integers(3, T + 1, (B, 2)))[1]


CASES = {
    "preference": (Preference(DPO()), test_preference.MODEL, test_preference.batch),
    "policy": (PolicyGradient(), test_policy.MODEL, test_policy.batch),
    "reward": (RewardModel(), test_reward.MODEL, texts),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_experts_are_balanced_and_reported(name):
    """The loss that is reported is the same; the gradient of the router is another one."""
    objective, plain, batch = CASES[name]
    data = batch()
    gradients, losses = [], []
    for weight in (0.0, 1.0):
        experts = Mixture(experts=4, top_k=2, d_ff=8, balance_loss=weight)
        model = replace(plain, feedforward=experts, dropout_rate=0.0)
        first, second = (P.init(models.spec(model), jax.random.key(seed)) for seed in (0, 1))
        context = StepContext(jax.random.key(3), references={"reference": second})

        def sums(params, model=model, context=context):
            return objective(model, params, data, context)

        found = sums(first)
        assert any("expert" in key or "balance" in key for key in found.metrics), found.metrics
        losses.append(found.loss)
        tree = jax.grad(lambda params, sums=sums: sums(params).loss)(first)
        gradients.append(tree["layers"]["feedforward"]["router"]["kernel"])
    assert losses[0] == losses[1]
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-4
