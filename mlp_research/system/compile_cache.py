"""The persistent compile cache: a second start of the same program does not compile it again."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import jax


def directory() -> Path:
    """In the user's cache, one folder for each version of XLA and kind of machine.

    Programs hold machine code: on another processor they are refused, or worse.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    machine = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    name = f"jaxlib-{importlib.metadata.version('jaxlib')}-{platform.machine()}-{machine}"
    return Path(base) / "mlp_research" / "compiled" / name


def enable() -> None:
    """Use the cache, unless the user's environment already names another or none can be made."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    path = directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    # By default only what takes a second to compile is kept: nothing of this size.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _processor() -> str:
    """What decides which instructions a program may hold."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
