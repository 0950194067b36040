"""The code book of VQ-VAE against that of vector-quantize-pytorch, over several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.zoo.vector_quantised import Use, moved, nearest, straight_through

K, W, N, DECAY = 12, 5, 40, 0.8


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
def test_book_codes_and_gradients_are_those_of_vector_quantize_pytorch():
    import torch
    from vector_quantize_pytorch import VectorQuantize

    rng = np.random.default_rng(0)
    start = rng.normal(size=(K, W)).astype(np.float32)
    theirs = VectorQuantize(
        dim=W,
        codebook_size=K,
        decay=DECAY,
        commitment_weight=0.25,
        threshold_ema_dead_code=0,
        rotation_trick=False,
        eps=0.0,  # it would smooth the counts, which the paper does not
    )
    theirs._codebook.embed.data.copy_(torch.from_numpy(start)[None])
    theirs._codebook.embed_avg.data.copy_(torch.from_numpy(start)[None])
    theirs._codebook.cluster_size.data.fill_(1.0)
    use = Use(jnp.ones(K), jnp.asarray(start))
    for _ in range(5):
        states = rng.normal(size=(N, W)).astype(np.float32)
        y = rng.normal(size=(N, W)).astype(np.float32)
        leaf = torch.from_numpy(states)[None].requires_grad_()
        quantised, codes, loss = theirs(leaf)
        ((quantised[0] * torch.from_numpy(y)).sum() + loss.sum()).backward()

        def ours(z, use=use, y=y):
            book = use.book()
            codes = nearest(z, book)
            e = jax.lax.stop_gradient(book[codes])
            committed = 0.25 * jnp.square(z - e).mean()
            return (straight_through(z, e) * y).sum() + committed, (codes, e)

        gradient, (found, e) = jax.grad(ours, has_aux=True)(jnp.asarray(states))
        np.testing.assert_array_equal(found, codes[0])
        np.testing.assert_allclose(e, quantised[0].detach(), atol=1e-5)
        np.testing.assert_allclose(gradient, leaf.grad[0], atol=1e-5)
        use = moved(use, jnp.asarray(states), found, jnp.ones(N), DECAY)
        np.testing.assert_allclose(use.counts, theirs._codebook.cluster_size[0], rtol=1e-5)
        np.testing.assert_allclose(use.book(), theirs.codebook, atol=1e-5)
