"""Microsoft's mup: a token table, a hidden layer and a readout, eight times the base width, trained
by some steps of Adam."""

import numpy as np

VOCABULARY, BASE, WIDTH, RATE, STEPS = 11, 8, 64, 0.02, 5


def witness() -> dict[str, np.ndarray]:
    import torch
    from mup import MuAdam, MuReadout, set_base_shapes
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, width)
            self.hidden = nn.Linear(width, width)
            self.readout = MuReadout(width, VOCABULARY, bias=False)

        def forward(self, tokens):
            return self.readout(torch.tanh(self.hidden(self.table(tokens))))

    net = set_base_shapes(Net(WIDTH).double(), Net(BASE).double(), delta=Net(2 * BASE).double())
    generator = np.random.default_rng(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.from_numpy(generator.normal(size=tuple(weight.shape)) / WIDTH**0.5))
    arrays = {
        f"start/{name}": weight.detach().numpy().copy() for name, weight in net.named_parameters()
    }
    tokens, labels = (torch.from_numpy(generator.integers(0, VOCABULARY, 32)) for _ in range(2))
    optimizer = MuAdam(net.parameters(), lr=RATE, eps=1e-12)
    logits = []
    for _ in range(STEPS):
        found = net(tokens)
        logits.append(found.detach().numpy())
        optimizer.zero_grad()
        nn.functional.cross_entropy(found, labels).backward()
        optimizer.step()
    return arrays | {"tokens": tokens.numpy(), "labels": labels.numpy(), "logits": np.stack(logits)}
