"""What users of profilers reported, tried on the table of a step."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.runs.profile_table import instructions_of, read_profile, sources_of, table_of


@pytest.mark.thorough
@pytest.mark.report("jax-ml/jax#12381", right="A named scope inside of jit is seen.")
@pytest.mark.report("openxla/xprof#401", right="On CPU, too, the profile says which part it was.")
@pytest.mark.report(
    "skylineprof/skyline#45",
    right="Each turn of a loop counts, and the loop itself does not count again.",
)
def test_layers_in_a_loop_are_counted_by_their_scope(tmp_path):
    turns = 5

    @jax.jit
    def run(x):
        def layer(x, _):
            with jax.named_scope("attention"):
                return jnp.tanh(x @ x), None

        return jax.lax.scan(layer, x, None, length=turns)[0]

    x = jnp.eye(256) / 2
    jax.block_until_ready(run(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(run(x))
    (trace,) = tmp_path.rglob("*.xplane.pb")
    sources = sources_of(jax.local_devices()[0].client.live_executables())
    ran = instructions_of(str(trace))
    dots = [each for each in ran if "attention" in sources[each.program, each.instruction].op_name]
    assert len(dots) >= turns and len(dots) % turns == 0
    table = table_of(ran, sources, 1)
    times = [time for part in table.parts.values() for time in part.values()]
    assert sum(times) + table.idle == pytest.approx(table.step)
    assert any(line.startswith("attention ") for line in read_profile(str(tmp_path), 1))
