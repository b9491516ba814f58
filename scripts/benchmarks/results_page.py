"""Measured results as sections of a document, each with its command, machine and date."""

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "results.md"


def record(document: Path, name: str, title: str, command: str, body: Sequence[str]) -> None:
    """Write the section `name` into a Markdown document, in place of the one of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = "\n".join(
        [begin, f"## {title}", "", f"`{command}` ({today()}; {machine()})", "", *body, end]
    )
    text = document.read_text(encoding="utf-8") if document.exists() else "# Results\n"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if found.search(text):
        text = found.sub(lambda _: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    document.write_text(text, encoding="utf-8")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine() -> str:
    """Processor, cores and the versions that decide speed and numbers."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy"))
    return (
        f"{processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, {versions}"
    )


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
