"""What a loader's plan promises; tests hold the package's own plan against it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from mlp_research.data.batches import Split
from mlp_research.data.loader import Plan, train_chunks
from mlp_research.testing.promises import Fault


@dataclasses.dataclass(frozen=True)
class LoaderUnderTest:
    """A way to make a plan from a seed."""

    build: Callable[..., Plan]

    @functools.cached_property
    def plan(self) -> Plan:
        return self.build(seed=0)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows of every step, a call for each step."""
        return self.rest(0, 1)

    def rest(self, position: int, steps_per_call: int) -> np.ndarray:
        """The rows of every step after `position`, from a plan made anew as a resume does."""
        chunks = self.build(seed=0).chunks(position, steps_per_call)
        parts = [np.zeros((0, self.plan.batch_size), np.int32)]
        for index in range(len(chunks)):
            rows, count = chunks.rows(index)
            parts.append(rows[: int(count)])
        return np.concatenate(parts)

    def epoch(self, number: int) -> np.ndarray:
        length = self.plan.steps_per_epoch
        return self.rows[number * length : (number + 1) * length].ravel()


def can_be_built(test: LoaderUnderTest) -> Fault:
    """Without this the others are not looked at."""
    plan = test.plan
    if plan.epochs < 2 or plan.steps_per_epoch < 3:
        return f"{plan} is too short to look at: make 2 epochs of 3 steps or more"
    return None


def orders_every_row_each_epoch(test: LoaderUnderTest) -> Fault:
    """An epoch's order holds each training row once."""
    for epoch in range(test.plan.epochs):
        if not np.array_equal(np.sort(test.plan.permutation(epoch)), np.arange(test.plan.rows)):
            return f"the order of epoch {epoch} is no permutation of {test.plan.rows} rows"
    return None


def gives_full_batches(test: LoaderUnderTest) -> Fault:
    """As many steps as the plan says, each of the batch size."""
    wanted = (test.plan.steps_per_epoch * test.plan.epochs, test.plan.batch_size)
    return None if test.rows.shape == wanted else f"{test.rows.shape} came, wanted {wanted}"


def trains_on_no_row_twice_an_epoch(test: LoaderUnderTest) -> Fault:
    for epoch in range(test.plan.epochs):
        rows, counts = np.unique(test.epoch(epoch), return_counts=True)
        if counts.max() > 1:
            return f"epoch {epoch} holds row {rows[counts.argmax()]} {counts.max()} times"
    return None


def stays_within_the_training_rows(test: LoaderUnderTest) -> Fault:
    """No index leads to a row that was held out, nor counts from the end."""
    low, high, rows = test.rows.min(), test.rows.max(), test.plan.rows
    return f"it asks for rows {low} to {high} of {rows}" if low < 0 or high >= rows else None


def repeats_the_order_of_its_seed(test: LoaderUnderTest) -> Fault:
    return None if np.array_equal(test.rows, test.rest(0, 1)) else "one seed gave two orders"


def changes_the_order_every_epoch(test: LoaderUnderTest) -> Fault:
    for one, other in itertools.combinations(range(test.plan.epochs), 2):
        if np.array_equal(test.epoch(one), test.epoch(other)):
            return f"epochs {one} and {other} have the same order"
    return None


def changes_the_order_with_the_seed(test: LoaderUnderTest) -> Fault:
    """Neighbouring seeds share no epoch's order."""
    orders: dict[bytes, tuple[int, int]] = {}
    for seed, epoch in itertools.product(range(4), range(test.plan.epochs)):
        order = test.build(seed=seed).permutation(epoch).tobytes()
        before = orders.setdefault(order, (seed, epoch))
        if before[0] != seed:
            return f"(seed, epoch) {before} and {(seed, epoch)} have the same order"
    return None


def resumes_at_any_step(test: LoaderUnderTest) -> Fault:
    """Rebuilt at a position, it gives what was left."""
    for position in range(len(test.rows) + 1):
        if not np.array_equal(test.rest(position, 2), test.rows[position:]):
            return f"resumed at step {position} it gives other batches"
    return None


def gives_the_same_batches_for_any_chunk_length(test: LoaderUnderTest) -> Fault:
    length = test.plan.steps_per_epoch
    for steps_per_call in (2, 3, length - 1, length, length + 1, 10 * length):
        if not np.array_equal(test.rest(0, steps_per_call), test.rows):
            return f"with {steps_per_call} steps a call it gives other batches"
    return None


def streams_what_it_plans(test: LoaderUnderTest) -> Fault:
    """The images that arrive are those of the planned rows, in order."""
    bits = np.arange(test.plan.rows, dtype=np.uint32)
    split = Split(bits.view(np.uint8).reshape(-1, 4), (bits % 251).astype(np.uint8))
    arrived = [
        np.ascontiguousarray(images).view(np.uint32)[:, 0]
        for chunk in train_chunks(test.plan.chunks(0, 2), split)
        for images in np.asarray(chunk.steps.images)[: int(chunk.count)]
    ]
    same = np.array_equal(arrived, test.rows)
    return None if same else "the images that arrive are not those of the planned rows"


LOADER_PROMISES = {
    promise.__name__: promise
    for promise in (
        can_be_built,
        orders_every_row_each_epoch,
        gives_full_batches,
        trains_on_no_row_twice_an_epoch,
        stays_within_the_training_rows,
        repeats_the_order_of_its_seed,
        changes_the_order_every_epoch,
        changes_the_order_with_the_seed,
        resumes_at_any_step,
        gives_the_same_batches_for_any_chunk_length,
        streams_what_it_plans,
    )
}
"""What a loader promises; the first is what the others stand on."""
