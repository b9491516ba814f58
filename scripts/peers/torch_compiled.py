"""PyTorch compiled: the eager program with `torch.compile` around its loss, and fused Adam.

Notice: nothing else of the program changes, and neither does where its state lives. The compiler
traces the bytecode of `loss` at the first call, with its backward pass, and guards what it assumed:
a new shape compiles again. `dynamic=False` asks for one program a batch size, as `jax.jit` makes
them; by default the second size would compile one for all. `fused=True` updates all parameters in
one kernel. On a CPU this needs a C++ compiler; the first call takes 15 s of one core, or 2 s where
the compiler's cache knows the program.
"""

import numpy as np
import torch
import torch_eager
from peer import Code, Weights
from torch import Tensor

loss = torch.compile(torch_eager.loss, dynamic=False)


def adam(model: torch_eager.MLP) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


class TorchCompiled(torch_eager.TorchEager):
    name = "PyTorch compiled"
    code: Code = (
        (torch_eager.__file__, "MLP", "loss", "step", "train_epoch"),
        (__file__, "loss", "adam"),
    )

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.optimizer = adam(self.model)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        return torch_eager.step(self.model, self.optimizer, images, labels, loss)

    def train_epoch(self, images: Tensor, labels: Tensor, order: np.ndarray) -> np.ndarray:
        losses = torch_eager.train_epoch(self.model, self.optimizer, images, labels, order, loss)
        return losses.cpu().numpy()
