"""Starts scripts quickly: a process that has imported what they import, and forks one at a request.

A script spends most of its start on imports. The starter has done them and nothing more: JAX has
made no device and there is one thread, so that a fork is sound. What it starts is a process of its
own, with the signal handlers of any other.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests import processes

SCRIPTS = ("train", "sweep")
IMPORTED = (
    *("mlp_research.fit", "mlp_research.sweep.run", "mlp_research.figures"),
    "mlp_research.storage.run_folder",
    *(
        "orbax.checkpoint.experimental.v1",
        "tensorboardX.event_file_writer",
        "matplotlib.backends.backend_agg",
    ),
)
"""What the scripts import only when they need it."""


class Started:
    """A script in a process of its own; what it prints goes into a file."""

    def __init__(self, pid: int, poll: Callable[[], int | None], printed: Path):
        self.pid = pid
        self._poll = poll
        self._printed = printed
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """The exit code, minus the number of the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self._poll()
        return self._code

    def until(self, moment: Callable[[], bool], limit: float = processes.LIMIT) -> bool:
        """Whether the moment came before the process ended, which it does within some seconds."""
        deadline = time.monotonic() + limit
        while not moment():
            if self.code is not None:
                return False
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {limit} s:\n{self.printed()[-2000:]}")
            time.sleep(0.001)
        return True

    def wait(self) -> int:
        """The exit code, when there is one."""
        self.until(lambda: self.code is not None)
        assert self._code is not None
        return self._code

    def printed(self) -> str:
        return self._printed.read_text(errors="replace")


class Starter:
    """The starter, asked from the process of the tests."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.starter"],
            cwd=processes.ROOT,
            env=processes.environment() | {"OPENBLAS_NUM_THREADS": "1"},  # no threads of its own
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the starter has ended: {self._process.wait()}"
        return json.loads(line)

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _next_file(self) -> Path:
        self._started += 1
        return self._folder / f"printed-{self._started:03}"

    def start(self, script: str, *words: object, cache: Path | None = None) -> Started:
        """Fork a script (`train`, `sweep`) with these words on its command line.

        With `cache` it has a compile cache of its own there, else that of the session.
        """
        printed = self._next_file()
        request = {"script": script, "words": [*map(str, words)], "printed": str(printed)}
        pid = self._ask(**request, cache=cache and str(cache))
        return Started(pid, lambda: self._ask(pid=pid), printed)

    def start_from_nothing(self, script: str, *words: object) -> Started:
        """As a user starts it, imports and all."""
        printed = self._next_file()
        path = processes.ROOT / "scripts" / f"{script}.py"
        with printed.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(path), *map(str, words)],
                stdout=file,
                stderr=file,
                env=processes.environment(),
            )
        return Started(process.pid, process.poll, printed)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=processes.LIMIT)
        self._process.stdout.close()


def serve() -> None:
    """Answer requests, one line of JSON each, until there are no more."""
    mains = {name: processes.load_script(name).main for name in SCRIPTS}
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would not be sound"
    print(json.dumps("ready"), flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "pid" in request:
            answer = exit_code(request["pid"])
        else:
            answer = os.fork()
            if answer == 0:
                become(request, mains[request["script"]])
        print(json.dumps(answer), flush=True)


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(request: dict[str, Any], main: Callable[[Any], None]) -> NoReturn:
    """Be the script from here to its end."""
    import jax

    from mlp_research.terminal import command_line

    if request["cache"] is not None:  # which the package chooses where JAX has none
        jax.config.update("jax_compilation_cache_dir", None)
        os.environ["XDG_CACHE_HOME"] = request["cache"]
    printed = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, printed, printed)):
        os.dup2(file, number)
    sys.argv = [f"scripts/{request['script']}.py", *request["words"]]
    command_line.run(main)


if __name__ == "__main__":
    serve()
