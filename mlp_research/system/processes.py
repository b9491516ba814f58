"""Several processes that compute one run together. One process is a group of one.

Every process runs the same program. Each loads its part of every batch; the first alone writes the
run's folder; a group of which one is lost ends, and the run goes on from its last checkpoint.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from mlp_research.errors import ConfigError, Failure

HEARTBEAT_SECONDS = 20
"""A process that is silent for so long is taken for lost."""


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the group, before anything is computed. What is None, the cluster's environment tells.

    Raises `ConfigError` where it does not, or where the group does not come together.
    """
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the processes did not come together: {reason}. Outside a cluster that JAX knows "
            "(SLURM, Open MPI, Kubernetes, TPU) give --distributed.coordinator HOST:PORT, "
            "--distributed.processes N and --distributed.process I (0 to N - 1)"
        ) from None


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def are_many() -> bool:
    return jax.process_count() > 1


def first_succeeded(success: bool) -> bool:
    """What the first process says of itself, on every process."""
    if not are_many():
        return success
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(success)))


def all_have(number: int) -> bool:
    """Whether every process has the same number, of 32 bits."""
    if not are_many():
        return True
    return bool((multihost_utils.process_allgather(np.uint32(number)) == number).all())


def wait_for_all(what: str) -> None:
    """Return when every process is here."""
    if are_many():
        multihost_utils.sync_global_devices(what)


def on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """The whole of an array, wherever its parts lie."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def stop_is_agreed(question: int) -> bool:
    """Whether a process was asked to stop by SIGTERM, and all have now come to this question.

    Questions are counted 0, 1, 2 ... alike on every process: JAX's preemption service, which holds
    the signal's handler, agrees on the number after the largest that any process has asked.
    """
    return bool(multihost_utils.reached_preemption_sync_point(question))


@contextlib.contextmanager
def ending_together(agreed: type[Exception]) -> Iterator[None]:
    """In a group, a failure ends this process at once, so that no other waits for it for ever.

    Nothing is closed: closing waits for processes that are gone. What is on the disk is sound.
    `agreed` is what all processes raise together; it passes.
    """
    try:
        yield
    except agreed:
        raise
    except Exception as error:
        if not are_many():
            raise
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, jax.errors.JaxRuntimeError) or "onnection" in reason:
            message = f"another process of the run is gone or has failed ({reason})"
        elif isinstance(error, Failure):
            message = str(error)
        else:
            message = traceback.format_exc()
        print(
            f"process {jax.process_index()} of {jax.process_count()} ends: {message}\n"
            "the run goes on from its last checkpoint by --resume, with any number of processes",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
