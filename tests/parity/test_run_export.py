"""Exported runs in transformers: the same ids, the same logits, the same greedy text."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import decoding, models
from jaxformer.decoding import Sampling
from jaxformer.tools.model_page import auto_class
from tests.tools.runs_to_export import KINDS, exported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXTS = ("the quick brown fox", "dog. the lazy")


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_opens_the_folder(kind, tmp_path):
    folder, out = exported(kind, tmp_path)
    run = jaxformer.open_run(folder)
    name = auto_class(run.model)
    theirs = getattr(transformers, name).from_pretrained(out).eval()
    if kind == "images":
        images = np.random.default_rng(0).random((2, 8, 8, 1), np.float32)
        ours = models.apply(run.model, run.params, jnp.asarray(images)).logits
        with torch.no_grad():
            found = theirs(torch.tensor(images).permute(0, 3, 1, 2)).logits
        np.testing.assert_allclose(found, ours, atol=1e-5)
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = ("123", "98") if kind == "translator" else TEXTS
    ends = (run.tokenizer.end_of_text,) if kind == "translator" else ()
    for text in texts:
        ids = run.tokenizer.encode(text)
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == text
        source = torch.tensor([ids])
        if kind == "translator":
            ids.append(run.tokenizer.end_of_text)
            source = torch.tensor([ids])
            start = [run.tokenizer.end_of_text]
            with torch.no_grad():
                found = theirs(source, decoder_input_ids=torch.tensor([start])).logits
            options = dict(source=jnp.array([ids]))
            ours = models.apply(run.model, run.params, jnp.array([start]), **options).logits
        else:
            with torch.no_grad():
                found = theirs(source).logits
            ours = models.apply(run.model, run.params, jnp.array([ids])).logits
        np.testing.assert_allclose(found, ours, atol=1e-5)
        if kind == "hidden":
            continue
        options = dict(sampling=Sampling(temperature=0.0), stop_tokens=ends)
        prompts, sources = ([start], [ids]) if kind == "translator" else ([ids], None)
        (ours,) = decoding.generate(run.model, run.params, prompts, 8, sources=sources, **options)
        written = theirs.generate(source, do_sample=False, max_new_tokens=8)[0].tolist()
        written = written[1:] if kind == "translator" else written[len(ids) :]
        assert written[: len(ours)] == list(ours)
