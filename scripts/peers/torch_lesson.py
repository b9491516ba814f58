"""The lesson's program in PyTorch, compiled: the same model, optimizer, batches and evaluation.

python scripts/peers/torch_lesson.py [--epochs 10] [--seed 0]
"""

import argparse
import time

import numpy as np
import torch
from peer import he_weights
from torch_compiled import TorchCompiled

from mlp_research.data import IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, load

BATCH_SIZE = 128


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(dim=-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    data = load(DEFAULT_DIRECTORY, IdxConfig(validation=0))
    program = TorchCompiled(he_weights(flags.seed))
    train = program.place(data.train.images, data.train.labels)
    test = program.place(data.test.images, data.test.labels)
    for epoch in range(flags.epochs):
        started = time.perf_counter()
        order = np.random.default_rng((flags.seed, epoch)).permutation(len(data.train))
        whole = order[: len(order) // BATCH_SIZE * BATCH_SIZE].astype(np.int32)
        program.train_epoch(*train, whole.reshape(-1, BATCH_SIZE))
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch + 1:2}  test {100 * accuracy(program.model, *test):.2f} %  "
            f"{seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
