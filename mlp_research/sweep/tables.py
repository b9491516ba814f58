"""A sweep in words: its table, a sentence for each claim, and both as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]


def sweep_section(summary: Mapping[str, Any]) -> list[str]:
    """A sweep's summary as Markdown: a row a setting, then a sentence for each claim."""
    said = [f"- {sentence}" for sentence in sweep_sentences(summary)]
    return [*table(*sweep_table(summary)), *(["", *said] if said else [])]


def sweep_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of a sweep's summary: a row a setting."""
    rows = [
        [
            setting["setting"],
            str(setting["test"]["n"]),
            *(_percent(setting["test"][name]) for name in ("mean", "standard_deviation")),
            f"{_percent(setting['test']['low'])} to {_percent(setting['test']['high'])}",
            _percent(setting["validation"]["mean"]) if setting["validation"] else "-",
        ]
        for setting in summary["settings"]
    ]
    headings = ["setting", "seeds", "test %", "standard deviation", "95 % interval", "validation %"]
    return headings, rows


def sweep_sentences(summary: Mapping[str, Any]) -> list[str]:
    """One sentence for each claim that can or cannot be made of a sweep."""
    sentences = [
        f"left out, as it ceased to be finite: {lost['setting']}, seed {lost['seed']}"
        for lost in summary["left_out"]
    ]
    sentences += [compared["sentence"] for compared in summary["comparisons"]]
    shares = summary["variance_shares"] or {}
    for stream, share in shares.items():
        ends = f"{_percent(share['low'])} to {_percent(share['high'])}"
        sentences.append(
            f"{stream}: {_percent(share['estimate'])} % of the variance of test accuracy "
            f"(95 % interval {ends})"
        )
    if summary["chosen_by_validation"] and len(summary["settings"]) > 1 and not shares:
        sentences.append(
            f"best by validation: {summary['chosen_by_validation']}. The test set is reported "
            "once, and chose nothing."
        )
    return sentences


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}"
