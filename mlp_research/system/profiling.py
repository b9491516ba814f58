"""A profile of some steps of a run, for TensorBoard."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import jax

from mlp_research.errors import ConfigError

Item = TypeVar("Item")


def parse_steps(text: str) -> tuple[int, int]:
    """(START, STOP) of `START:STOP`, the steps after START and up to STOP."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise ConfigError(f"--profile {text!r}: give START:STOP, such as 100:200, START < STOP")
    return int(start), int(stop)


def profiled(
    chunks: Iterator[Item], spans: Iterator[tuple[int, int]], steps: tuple[int, int], folder: Path
) -> Iterator[Item]:
    """Hand on the chunks, and trace those that hold any of the steps.

    `spans` are (first step, number of steps) of each chunk. A chunk is over when the next is asked
    for: the compiled program returns when it is done.
    """
    tracing = False
    try:
        for chunk, (first, count) in zip(chunks, spans, strict=True):
            wanted = first < steps[1] and first + count > steps[0]
            if tracing and not wanted:
                jax.profiler.stop_trace()
            elif wanted and not tracing:
                jax.profiler.start_trace(folder)
            tracing = wanted
            yield chunk
    finally:
        if tracing:
            jax.profiler.stop_trace()
