"""mT5 and UMT5."""

from dataclasses import replace

from tests.golden.families import Case, _t5


def _relative(model: str, untied: bool, seed: int, **config) -> Case:
    case = _t5(untied, num_layers=3, num_decoder_layers=2, d_ff=13, **config)
    return replace(case, model=f"{model}ForConditionalGeneration", seed=seed)


CASES = {
    "mt5": _relative("MT5", untied=True, seed=9),
    "umt5": _relative("UMT5", untied=False, seed=18, feed_forward_proj="gated-silu"),
}
