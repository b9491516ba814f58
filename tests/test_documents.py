"""What the documents say, they do: their Python runs, their commands parse, their links lead on."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro

from mlp_research.sweep import design
from tests import processes

README = processes.ROOT / "README.md"
RESULTS = processes.ROOT / "docs" / "results.md"
PATTERNS = processes.ROOT / "docs" / "skill-jax-patterns.md"
OPTIMIZER = processes.ROOT / "docs" / "prompt-jax-optimizer.md"
RELIABILITY = processes.ROOT / "docs" / "reliability.md"
PARTS = processes.ROOT / "docs" / "parts.md"
DEVICES = processes.ROOT / "docs" / "devices.md"
DOCUMENTS = (README, RESULTS, PATTERNS, OPTIMIZER, PARTS, DEVICES)
GUIDES = (PATTERNS, OPTIMIZER)
"""Their readers copy one block: each runs with the first one alone. Elsewhere blocks build up."""

LANGUAGES = {"python", "sh", "text"}
FENCE = re.compile(r"^ *(```+|~~~+)(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    """Line of the opening fence, from 1."""
    language: str
    source: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """All fenced blocks, in order. Raises `ValueError` at a fence that is never closed."""
    blocks, opened, lines = [], None, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, lines = (number, fence[1], fence[2].strip()), []
        elif opened is not None and line.strip() == opened[1]:
            blocks.append(Block(document, opened[0], opened[2], "".join(lines)))
            opened = None
        else:
            lines.append(f"{line}\n")
    if opened is not None:
        raise ValueError(f"{document.name}:{opened[0]}: the block is never closed")
    return blocks


def python_blocks(document: Path) -> list[Block]:
    return [block for block in blocks_of(document) if block.language == "python"]


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block. Raises `AssertionError` with the line of the document where it failed.

    A test that a block defines is not called: `test_extension.py` does so with the README's.
    """
    try:
        # The empty lines give each statement the number that it has in the document.
        exec(compile("\n" * block.line + block.source, str(block.document), "exec"), namespace)
    except Exception as error:
        line = failing_line(block, error)
        statement = block.source.splitlines()[line - block.line - 1].strip()
        raise AssertionError(
            f"{block.document.name}:{line}: {type(error).__name__}: {error}\n{statement}"
        ) from error


def failing_line(block: Block, error: BaseException) -> int:
    """The innermost line of the document in an error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(block.document):
        return error.lineno or block.line + 1
    line, trace = block.line + 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(block.document):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def run_with_what_it_needs(block: Block, blocks: Sequence[Block]) -> None:
    """Run a block in a namespace where those that its reader has run have run."""
    earlier = [other for other in blocks if other.line < block.line]
    namespace: dict[str, Any] = {"__name__": "document"}
    for other in earlier[:1] if block.document in GUIDES else earlier:
        run_block(other, namespace)
    run_block(block, namespace)


PYTHON = [block for document in DOCUMENTS for block in python_blocks(document)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_the_packages_kinds: None) -> Path:
    """Where a reader works: my_lab.py holds the parts that README and parts.md begin with."""
    first = [python_blocks(document)[0].source for document in (README, PARTS)]
    (tmp_path / "my_lab.py").write_text("\n\n".join(first), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON, ids=str)
@pytest.mark.usefixtures("folder")
def test_a_python_block_runs(block: Block):
    run_with_what_it_needs(block, python_blocks(block.document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_block_escapes_by_its_language(document: Path):
    for block in blocks_of(document):
        assert block.language in LANGUAGES, f"{block}: {block.language!r} is not one of {LANGUAGES}"


def test_a_failing_block_is_reported_with_its_line(tmp_path: Path):
    broken = tmp_path / "broken.md"
    broken.write_text(
        "# Title\n\n```python\none = 1\n```\n\n"  # lines 1 to 6
        "```python\nassert one == 1\n\nassert one == 2, 'no'\n```\n"  # 7 to 11
        "```python\ndef f():\n    raise KeyError('key')\nf()\n```\n"  # 12 to 16
        "```python\none +\n```\n"  # 17 to 19
    )
    one, two, three, four = python_blocks(broken)
    run_with_what_it_needs(one, [one])
    for block, message in (
        (two, "broken.md:10: AssertionError: no"),
        (three, "broken.md:14: KeyError: 'key'"),
        (four, "broken.md:18: SyntaxError"),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            run_with_what_it_needs(block, [one, block])
    with pytest.raises(AssertionError, match="NameError: name 'one' is not defined"):
        run_with_what_it_needs(two, [two])


def test_a_block_that_is_never_closed_is_an_error(tmp_path: Path):
    (tmp_path / "open.md").write_text("text\n```python\nassert False\n")
    with pytest.raises(ValueError, match=r"open\.md:2: the block is never closed"):
        blocks_of(tmp_path / "open.md")


# --- the fixed form of a pattern


def sections(document: Path) -> dict[str, str]:
    """Headings of the second order, and what stands under them."""
    parts = re.split(r"^## (.*)$", document.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("title", list(sections(PATTERNS)))
def test_every_pattern_has_the_fixed_form(title: str):
    body = sections(PATTERNS)[title]
    (source,) = re.findall(r"^```python\n(.*?)^```$", body, re.M | re.S)
    assert re.search(r"^assert ", source, re.M), "a block that asserts nothing cannot fail"
    places = [body.find(f"\n- **{part}.** ") for part in ("When", "Constraint", "Classic mistake")]
    assert -1 not in places and places == sorted(places)


# --- commands


def commands_of(text: str) -> list[str]:
    """Each `python scripts/...` command: in a sh block after any other, or in a code span."""
    fenced = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    lines = [part for block in fenced for part in re.split(r"&&|\n", block)]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [line.strip() for line in lines + spans if line.strip().startswith("python scripts/")]


def parsed(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> Any:
    """The flags that a script makes of a command line; it stops before anything runs."""

    class Parsed(BaseException):
        pass

    parse, found = tyro.cli, []

    def parse_and_stop(*arguments: Any, **options: Any) -> None:
        found.append(parse(*arguments, **options))
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse_and_stop)
    script = processes.load_script(Path(words[0]).stem)
    with pytest.raises(Parsed):
        script.main(list(words[1:]))
    return found[0]


WRITTEN = [
    (document.name, command)
    for document in DOCUMENTS
    for command in dict.fromkeys(commands_of(document.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("document", "command"), WRITTEN)
@pytest.mark.usefixtures("folder")
def test_a_command_names_a_script_and_flags_that_exist(
    document: str, command: str, monkeypatch: pytest.MonkeyPatch
):
    words = shlex.split(command)[1:]
    assert (processes.ROOT / words[0]).is_file(), f"{document}: {command}: there is no {words[0]}"
    if "[" in command:  # a usage line: `[PRESET] [--flag ...]`
        return
    if words[0].startswith("scripts/peers/"):  # programs of their own, with their own parsers
        source = (processes.ROOT / words[0]).read_text(encoding="utf-8")
        assert all(word in source for word in words[1:] if word.startswith("--")), command
        return
    placeholders = {"N": "1", "START:STOP": "3:5"}
    flags = parsed(monkeypatch, [placeholders.get(word, word) for word in words])
    if words[0] == "scripts/sweep.py":
        # What is varied is text for the parser: the plan knows the fields.
        design.plan(flags.config, flags.seeds, flags.vary, flags.vary_stream)


@pytest.mark.parametrize(
    "command", ["scripts/train.py --seeed 1", "scripts/evaluate.py", "scripts/train.py no-preset"]
)
def test_a_command_that_would_be_refused_is_seen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, command.split())
    assert ended.value.code == 2 and capsys.readouterr().err


def test_commands_are_found_in_blocks_and_in_code_spans():
    text = "```sh\npip install x && python scripts/a.py\n```\n| `python scripts/b.py --c 1` |\n"
    assert commands_of(text) == ["python scripts/a.py", "python scripts/b.py --c 1"]


# --- links


def anchors(document: Path) -> set[str]:
    """The names that headings can be linked by, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links_of(document: Path) -> list[str]:
    """The links that do not leave the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    return [link for link in dict.fromkeys(links) if "://" not in link]


@pytest.mark.parametrize(
    ("document", "link"),
    [(document, link) for document in DOCUMENTS for link in links_of(document)],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_a_link_leads_to_a_file_and_a_heading(document: Path, link: str):
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists(), f"{document.name} links to {link}: there is no {path}"
    assert not anchor or anchor in anchors(target), f"{target.name} has no heading #{anchor}"


def test_every_test_and_file_that_the_table_of_defects_names_is_there():
    table = sections(RELIABILITY)["Defects that were found so"]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    tests = "".join(path.read_text() for path in (processes.ROOT / "tests").rglob("test_*.py"))
    sources = {path.name for path in (processes.ROOT / "mlp_research").rglob("*.py")}
    sources |= {path.name for path in (processes.ROOT / "scripts").glob("*.py")}
    for mended, kept in rows:
        files, names = re.findall(r"`(\w+\.py)`", mended), re.findall(r"`(test_\w+)`", kept)
        assert files and set(files) <= sources, mended
        assert names and all(f"def {name}(" in tests for name in names), kept
