"""One MLP in every framework: do they take the same steps, and what does each ask of its user?

All peers start from the same weights and train on the same batches, once in float64 and once in
float32. In float64 a wrong program is seen at once, for rounding stays far below any difference
that matters. In float32 it is not: a change of the initial weights by 1 in 10 million, which is
their rounding, can change the loss by 1 in 100 after a hundred steps, within raw JAX alone. The
likely amplifiers are Adam, which divides a gradient by its size even where it is nearly nothing
but rounding, and the corner of ReLU.
"""

import ast
import contextlib
import dataclasses
import io
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import numpy as np
import peer
from jaxtyping import Float, Int32, UInt8

from mlp_research import figures
from mlp_research.data import IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, load
from mlp_research.sweep import tables
from mlp_research.sweep.figures import COLOURS, MARKS

SEED, STEPS, BATCH = 0, 100, 128
PRECISIONS = ("float64", "float32")
PALETTE = (*COLOURS, figures.GREY)
SMALLEST_DRAWN = 1e-16
"""What a difference of nothing is drawn as, on a logarithmic scale that has no zero."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """The rows that are trained on, and which of them at each step."""

    images: UInt8[np.ndarray, "examples pixels"]
    labels: UInt8[np.ndarray, " examples"]
    order: Int32[np.ndarray, "steps batch"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a peer says of itself, and its loss at each step by precision."""

    name: str
    state_lives: str
    randomness: str
    lines: int
    losses: dict[str, Float[np.ndarray, " steps"]]

    def differences(self, raw: "Outcome", precision: str) -> Float[np.ndarray, " steps"]:
        """At each step, relative to the raw version's loss."""
        return np.abs(self.losses[precision] / raw.losses[precision] - 1)


def measure() -> list[Outcome]:
    """Every peer's trajectories. Raises `ConfigError` where a framework is not installed."""
    peer.check_installed()
    data = batches(STEPS)
    return [compare(name, data) for name in peer.PEERS]


def batches(steps: int) -> Batches:
    """Shuffled MNIST training images, each at most once."""
    train = load(DEFAULT_DIRECTORY, IdxConfig(validation=0)).train
    rows = np.random.default_rng(SEED).permutation(len(train))[: steps * BATCH]
    order = np.arange(steps * BATCH, dtype=np.int32).reshape(steps, BATCH)
    return Batches(train.images[rows], train.labels[rows], order)


def compare(name: str, data: Batches) -> Outcome:
    """The peer's trajectories in each precision, from the lesson's initial weights."""
    runs = {precision: trained(name, precision, data) for precision in PRECISIONS}
    about = runs[PRECISIONS[0]][0]
    losses = {precision: losses for precision, (_, losses) in runs.items()}
    lines = code_lines(about.code)
    return Outcome(about.name, about.state_lives, about.randomness, lines, losses)


def trained(
    name: str, precision: str, data: Batches
) -> tuple[peer.Peer, Float[np.ndarray, " steps"]]:
    """The peer after its steps in this precision, and the loss of each."""
    with computing_in(precision):
        started = peer.start(name, peer.he_weights(SEED, precision))
        return started, trajectory(started, data)


def trajectory(started: peer.Peer, data: Batches) -> Float[np.ndarray, " steps"]:
    """The loss of each step, one call a step."""
    images, labels = started.place(data.images, data.labels)
    return np.array([float(started.step(images[rows], labels[rows])) for rows in data.order])


@contextlib.contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Within, JAX makes arrays of this type where it is asked for no other.

    This package promises float32 in its signatures: in float64 they are not checked.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", before or precision == "float64")
    try:
        with jax.enable_x64(precision == "float64"):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def code_lines(code: peer.Code) -> int:
    """Lines that define these names, without blank lines, docstrings and comments."""
    return sum(source_lines(Path(path).read_text(), names) for path, *names in code)


def source_lines(source: str, names: Sequence[str]) -> int:
    """The lines of code of a source's definitions of these names."""
    nodes = {name: node for node in ast.parse(source).body for name in defined(node)}
    wanted: set[int] = set()
    for node in (nodes[name] for name in names):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        wanted |= set(range(first, (node.end_lineno or first) + 1))
        wanted -= docstring_lines(node)
    return len(wanted & lines_with_code(source))


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of strings that are statements: docstrings, and those after fields."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def lines_with_code(source: str) -> set[int]:
    """Lines on which something else than white space and comments stands."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    return {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }


EXPLANATION = [
    f"The same initial weights and the same {STEPS} batches of {BATCH} MNIST images; Adam, "
    "learning rate 1e-3. A difference is that of the loss, relative to raw JAX, the largest of "
    "all steps. Lines are those of the model, the loss, the optimizer, the step and, but for "
    "this package and the data-parallel ones, the loop over an epoch, without imports, blank "
    "lines, docstrings and comments. This package's also hold dropout, normalisation, clipping, "
    "metrics and the skipping of surplus steps; its update rules (optimizers/) are not counted.",
    "",
    "In float64 all of them take the same steps: what is left of a difference is that PyTorch and "
    "XLA scale some pixels to neighbouring float32 numbers, and that this package's learning rate "
    "is a float32 number. In float32 rounding is amplified: a difference of 1 in 10 million after "
    "one step can be 1 in 100 after a hundred. Raw JAX often does the same against itself when its "
    "initial weights are changed by 1 in a million, so this tells no program from another. The "
    "likely amplifiers are Adam, which divides a gradient by its size even where it is nearly "
    "nothing but rounding, and the corner of ReLU.",
]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A row a peer; the first is what the others are compared with."""
    headings = (
        *("framework", "where the state lives", "how randomness is passed", "lines"),
        *(f"difference, {precision}" for precision in PRECISIONS),
    )
    raw = outcomes[0]
    rows = [
        (
            *(outcome.name, outcome.state_lives, outcome.randomness, str(outcome.lines)),
            *(f"{outcome.differences(raw, precision).max():.1e}" for precision in PRECISIONS),
        )
        for outcome in outcomes
    ]
    lines = tables.table(headings, rows)
    lines[1] = "| --- | --- | --- | ---: | ---: | ---: |"  # sentences stand to the left
    return lines


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The trajectories, and how far each lies from the first, in both precisions."""
    raw, *others = outcomes
    steps = np.arange(1, len(raw.losses["float32"]) + 1)
    with figures.picture(path, (11, 5)) as figure:
        losses, differences = figure.subplots(1, 2)
        wide: Any = {"color": "#BBBBBB", "linewidth": 6, "label": raw.name}
        losses.plot(steps, raw.losses["float32"], **wide)
        for index, outcome in enumerate(others):
            look: Any = {"color": PALETTE[index], "linewidth": 1}
            marks: Any = {"marker": MARKS[index], "markevery": (index, len(others) + 2)}
            losses.plot(steps, outcome.losses["float32"], label=outcome.name, **look, **marks)
            for precision, line in (("float32", "-"), ("float64", ":")):
                largest = np.maximum.accumulate(outcome.differences(raw, precision))
                values = np.maximum(largest, SMALLEST_DRAWN)
                differences.plot(steps, values, linestyle=line, **look, **marks)
        losses.set(xlabel="step", ylabel="cross-entropy in float32 (nats)")
        differences.axhline(1e-4, color=figures.GREY, linestyle="--", linewidth=1)
        differences.set(
            xlabel="step",
            ylabel=f"relative difference to {raw.name}, largest so far",
            yscale="log",
            title="dotted: float64; solid: float32; dashed: 1e-4",
        )
        figure.legend(loc="outside lower center", ncols=5)
        figures.write_title(figure, f"One MLP in every framework: {len(steps)} equal batches")
