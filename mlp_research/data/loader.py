"""The plan of shuffled chunks, streamed by Grain, and exact evaluation batches.

Grain streams row indices, a whole chunk an element; where the pixels do not lie on the device, a
second map gathers them. The position is one integer, the number of steps taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from mlp_research.data.batches import Batch, Chunk, MaskedBatch, RowChunk, Split
from mlp_research.data.idx import let_go, rows_of
from mlp_research.errors import ConfigError
from mlp_research.prng import order_generator

if TYPE_CHECKING:
    import grain


SHUFFLED_AHEAD = 1_000_000
"""From so many rows on, the next epoch is shuffled during this one: one would feel the time."""
LAST_STEP = 2**31 - 1
"""Steps are counted in 32 bits."""
WHOLE = slice(None)
"""All rows of a batch: what one process loads where there is no other."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows each step trains on: a fresh permutation every epoch, without a partial batch."""

    seed: int
    rows: int
    batch_size: int
    epochs: int
    _orders: dict[int, Future[np.ndarray]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self):
        if self.batch_size > self.rows:
            raise ConfigError(
                f"train.batch_size is {self.batch_size}, but there are {self.rows} training rows: "
                f"use at most {self.rows}"
            )
        if self.total_steps > LAST_STEP:
            raise ConfigError(
                f"train.epochs is {self.epochs}, but a run has at most {LAST_STEP} steps: with "
                f"{self.steps_per_epoch} an epoch use at most {LAST_STEP // self.steps_per_epoch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self.batch_size

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def permutation(self, epoch: int) -> Int32[np.ndarray, " rows"]:
        """The order of all rows in an epoch."""
        ahead = self.rows >= SHUFFLED_AHEAD and epoch + 1 < self.epochs
        for wanted in (epoch, epoch + 1) if ahead else (epoch,):
            if wanted not in self._orders:
                self._shuffle(wanted)
        order = self._orders[epoch]
        # Three are kept: read threads may stand on both sides of an epoch's end.
        for old in sorted(self._orders)[:-3]:
            del self._orders[old]
        return order.result()

    def _shuffle(self, epoch: int) -> None:
        """Begin to shuffle an epoch's order, in a thread that ends with it."""

        def shuffled() -> np.ndarray:
            order = np.arange(self.rows, dtype=np.int32)
            order_generator(self.seed, epoch).shuffle(order)
            return order

        with_a_thread = ThreadPoolExecutor(max_workers=1)
        self._orders[epoch] = with_a_thread.submit(shuffled)
        with_a_thread.shutdown(wait=False)

    def indices(self, start: int, steps: int) -> Int32[np.ndarray, "steps batch"]:
        """The rows of `steps` steps after the first `start`; all lie within one epoch."""
        epoch, first = divmod(start, self.steps_per_epoch)
        rows = slice(first * self.batch_size, (first + steps) * self.batch_size)
        return self.permutation(epoch)[rows].reshape(steps, self.batch_size)

    def chunks(self, position: int, steps_per_call: int) -> ChunkPlan:
        """The rest of the run after `position` steps, cut into chunks that end where epochs end."""
        return ChunkPlan(self, position, min(steps_per_call, self.steps_per_epoch))


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """The run after `position` steps as chunks with room for `capacity` steps each."""

    plan: Plan
    position: int
    capacity: int

    def __len__(self) -> int:
        if self.position >= self.plan.total_steps:
            return 0
        whole_epochs = self.plan.epochs - self.position // self.plan.steps_per_epoch - 1
        return self._first_epoch_chunks + whole_epochs * self._epoch_chunks

    def span(self, index: int) -> tuple[int, int]:
        """(first step, number of steps) of a chunk."""
        length = self.plan.steps_per_epoch
        if index < self._first_epoch_chunks:
            start = self.position + index * self.capacity
        else:
            epochs, chunk = divmod(index - self._first_epoch_chunks, self._epoch_chunks)
            start = (self.position // length + 1 + epochs) * length + chunk * self.capacity
        return start, min(self.capacity, length - start % length)

    def rows(self, index: int) -> tuple[Int32[np.ndarray, "capacity batch"], np.ndarray]:
        """(rows of each step of a chunk, number of real steps)."""
        start, count = self.span(int(index))
        # Unused room is filled with the chunk's own first row: never trained on, always legal.
        rows = np.empty((self.capacity, self.plan.batch_size), np.int32)
        rows[:count] = self.plan.indices(start, count)
        rows[count:] = rows[0, 0]
        return rows, np.asarray(np.int32(count))

    def spans(self) -> Iterator[tuple[int, int]]:
        """The span of every chunk in turn."""
        return map(self.span, range(len(self)))

    @property
    def _first_epoch_chunks(self) -> int:
        length = self.plan.steps_per_epoch
        return -(-(length - self.position % length) // self.capacity)

    @property
    def _epoch_chunks(self) -> int:
        return -(-self.plan.steps_per_epoch // self.capacity)


def train_chunks(
    chunks: ChunkPlan, split: Split, read_threads: int = 0, part: slice = WHOLE
) -> Iterator[Chunk]:
    """Stream the chunks of a plan with their pixels, gathered on the host.

    `read_threads` gather ahead: of use where pixels come from the disk, in memory it gains nothing.
    `part` is the part of each batch that this process loads.
    """

    def gather(planned: tuple[np.ndarray, np.ndarray]) -> Chunk:
        rows, count = planned[0][:, part], planned[1]
        return Chunk(Batch(rows_of(split.images, rows), split.labels[rows]), count)

    yield from _stream(_planned(chunks).map(gather), read_threads)


def row_chunks(chunks: ChunkPlan, data: Batch, part: slice = WHOLE) -> Iterator[RowChunk]:
    """Stream the chunks of a plan as rows of `data`, which lies on the device."""
    for rows, count in _stream(_planned(chunks)):
        yield RowChunk(data, rows[:, part], count)


def member_chunks(members: Sequence[ChunkPlan], data: Batch) -> Iterator[RowChunk]:
    """Stream the plans of many members side by side: rows [members, K, batch] of `data`."""
    import grain

    def plan(index: int) -> tuple[np.ndarray, np.ndarray]:
        rows, counts = zip(*(chunks.rows(index) for chunks in members), strict=True)
        return np.stack(rows), counts[0]

    for rows, count in _stream(grain.MapDataset.range(len(members[0])).map(plan)):
        yield RowChunk(data, rows, count)


def _planned(chunks: ChunkPlan) -> grain.MapDataset:
    """The plan as a Grain dataset of (rows [K, batch], count)."""
    import grain  # over a second to import: not paid by commands that train nothing

    return grain.MapDataset.range(len(chunks)).map(chunks.rows)


def _stream(dataset: grain.MapDataset, read_threads: int = 0) -> Iterator[Any]:
    import grain

    options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=2 * read_threads)
    yield from dataset.to_iter_dataset(options)


def evaluation_batches(split: Split, batch_size: int, part: slice = WHOLE) -> Iterator[MaskedBatch]:
    """Every row once, in order; the last batch is filled up with rows that count nothing.

    `part` is the part of each batch that this process loads.
    """
    first, last, _ = part.indices(batch_size)
    for start in range(0, len(split), batch_size):
        rows = slice(start + first, start + last)
        images, labels = split.images[rows], split.labels[rows]
        missing = last - first - len(labels)
        batch = MaskedBatch(
            np.pad(images, ((0, missing), (0, 0))),
            np.pad(labels, (0, missing)),
            np.arange(last - first) < len(labels),
        )
        let_go(split.images)
        yield batch
