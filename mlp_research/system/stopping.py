"""Stopping by a signal without losing a step."""

import signal
import threading
from pathlib import Path
from typing import Any

from mlp_research.system import processes


class Stopped(Exception):
    """The run was asked to stop by a signal, has saved its state, and can go on."""

    def __init__(self, number: int, run_dir: Path):
        super().__init__(
            f"stopped by {signal.Signals(number).name}; the state is saved in {run_dir}"
        )
        self.signal = number
        self.run_dir = run_dir


class StopRequest:
    """SIGTERM and Ctrl-C ask the loop to stop after its chunk; a second one interrupts at once.

    Where several processes compute one run, SIGTERM is JAX's, and all agree on the chunk.
    """

    def __init__(self):
        self.signal: int | None = None
        self._questions = 0

    def __enter__(self) -> "StopRequest":
        # Only the main thread may handle signals; elsewhere (a notebook's worker) nothing changes.
        handles = threading.current_thread() is threading.main_thread()
        handles = handles and not processes.are_many()
        signals = (signal.SIGTERM, signal.SIGINT) if handles else ()
        self._previous = {number: signal.signal(number, self._ask) for number in signals}
        return self

    def asked(self) -> int | None:
        """The signal that asks to stop now, if one does. Every process asks after every chunk."""
        if self.signal is None and processes.are_many():
            if processes.stop_is_agreed(self._questions):
                self.signal = signal.SIGTERM
            self._questions += 1
        return self.signal

    def _ask(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
