"""PyTorch as it is written every day: each operation runs as it is called.

Notice: `step` returns the loss alone, for everything else changes in place. `backward` leaves the
gradients on the parameters (`.grad`), where they add up until `zero_grad`; the optimizer was given
the parameters once and keeps its moments inside. Chance is one global generator,
`torch.manual_seed`, which every layer and every dropout draws from in the order of the calls.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from peer import Code, Weights, sizes_of
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class MLP(nn.Module):
    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)
        )

    def forward(self, images: Tensor) -> Tensor:
        *hidden_layers, last = self.layers
        hidden = images
        for layer in hidden_layers:
            hidden = nn.functional.relu(layer(hidden))
        return last(hidden)


def loss(model: MLP, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def adam(model: MLP) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def step(
    model: MLP,
    optimizer: torch.optim.Adam,
    images: Tensor,
    labels: Tensor,
    loss: Callable[[MLP, Tensor, Tensor], Tensor] = loss,
) -> Tensor:
    optimizer.zero_grad()
    value = loss(model, images, labels)
    value.backward()
    optimizer.step()
    return value.detach()


def train_epoch(
    model: MLP,
    optimizer: torch.optim.Adam,
    images: Tensor,
    labels: Tensor,
    order: np.ndarray,
    loss: Callable[[MLP, Tensor, Tensor], Tensor] = loss,
) -> Tensor:
    batches = torch.from_numpy(order).to(images.device)
    losses = [step(model, optimizer, images[rows], labels[rows], loss) for rows in batches]
    return torch.stack(losses)


def model_of(weights: Weights) -> MLP:
    """The model with these weights; PyTorch keeps a weight as [outputs, inputs]."""
    model = MLP(sizes_of(weights)).to(torch.tensor(weights[0][0]).dtype)
    layers = {f"layers.{index}": layer for index, layer in enumerate(weights)}
    model.load_state_dict(
        {f"{name}.weight": torch.tensor(weight.T) for name, (weight, _) in layers.items()}
        | {f"{name}.bias": torch.tensor(bias) for name, (_, bias) in layers.items()}
    )
    return model.to(DEVICE)


class TorchEager:
    name = "PyTorch eager"
    state_lives = "in the module and the optimizer, changed in place"
    randomness = "one global generator: `torch.manual_seed`"
    code: Code = ((__file__, "MLP", "loss", "adam", "step", "train_epoch"),)

    def __init__(self, weights: Weights):
        self.model = model_of(weights)
        self.optimizer = adam(self.model)

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = torch.tensor(images, dtype=torch.float32, device=DEVICE) / 255
        dtype = next(self.model.parameters()).dtype  # PyTorch multiplies only equal types
        return pixels.to(dtype), torch.tensor(labels, dtype=torch.int64, device=DEVICE)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        return step(self.model, self.optimizer, images, labels)

    def train_epoch(self, images: Tensor, labels: Tensor, order: np.ndarray) -> np.ndarray:
        losses = train_epoch(self.model, self.optimizer, images, labels, order)
        return losses.cpu().numpy()
