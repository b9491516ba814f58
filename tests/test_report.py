"""A run's lines fit a terminal, a file holds lines alone, and no ending breaks the terminal."""

import dataclasses
import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlp_research.terminal.report import REFRESH_SECONDS, Report, aligned, duration

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@dataclasses.dataclass(frozen=True)
class Layer:
    path: str
    kind: str
    output: str
    parameters: int


LAYERS = [Layer("layers[0]", "Linear", "256", 200_960), Layer("", "MLP", "10", 7)]
ROW = {
    "epoch": 9999,
    "step": 9_999_999,
    "loss": 12.34567,
    "accuracy": 1.0,
    "gradient_norm": 12345.678,
    "clipped": 0.5,
    "images_per_second": 9_876_543.2,
}
FULL_ROW = ROW | {"test": 1.0, "train_rows": 0.98765, "validation": 0.1}
SUMMARY = {
    "test": {"accuracy": 0.9694, "correct": 9694, "total": 10_000, "loss": 0.0953},
    "train_seconds": 12.04,
}


class Terminal(io.StringIO):
    """A terminal of 80 columns that remembers what was written on it."""

    def isatty(self) -> bool:
        return True

    @property
    def frames(self) -> list[str]:
        """Each drawing of the bar."""
        return re.findall(r"step [^\r\n]* left", self.getvalue())


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def whole_run(report: Report) -> None:
    with report:
        report.describe({"model": "mlp", "folder": "runs/[bold]x"}, LAYERS)
        report.progress(39, 858, 50_000.0)
        report.say("checkpoint [red] is damaged :smile:")
        report.epoch(FULL_ROW)
        report.result([SUMMARY], Path("runs/x"))


def test_a_file_holds_plain_lines_without_progress(monkeypatch: pytest.MonkeyPatch):
    # What makes rich write colours into a file must not reach ours.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    file = io.StringIO()
    whole_run(Report(file))
    assert file.getvalue().splitlines() == [
        "model    mlp",
        "folder   runs/[bold]x",
        "  layer            kind    output  parameters",
        "  layers[0]        Linear     256     200,960",
        "  the model's own  MLP         10           7",
        "  all                                 200,967",
        "checkpoint [red] is damaged :smile:",
        "epoch     step     loss  train %  rows %  valid %  test %  grad norm   images/s",
        " 9999  9999999  12.3457   100.00   98.77    10.00  100.00  12345.678  9,876,543",
        "test     96.94 % (9694 of 10000), loss 0.0953; trained in 12.0 s",
        "result   runs/x/result.json",
    ]


def test_a_dumb_terminal_is_treated_as_a_file(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    whole_run(Report(terminal))
    assert "\x1b" not in terminal.getvalue() and not terminal.frames


def test_a_terminal_shows_the_same_lines_and_a_bar(terminal: Terminal):
    file = io.StringIO()
    whole_run(Report(file))
    whole_run(Report(terminal))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", terminal.getvalue())
    for line in file.getvalue().splitlines():
        assert line in shown
    assert terminal.frames[0] == "step 39 of 858  50,000 images/s  -:-- left"


def test_every_line_fits_80_columns(terminal: Terminal):
    report = Report(terminal, clock=(clock := Clock()))
    with report:
        report.progress(1, 9_999_999, 9_876_543.0)
        clock.now += 36_000
        report.progress(2_000_000, 9_999_999, 9_876_543.0)
        report.epoch(FULL_ROW)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if "images/s  " in line]
    assert any(line.endswith("9,876,543 images/s  40:00:00 left") for line in bars)
    assert max(map(len, bars)) <= 80 - len("^C")  # which a terminal writes behind the bar


def test_columns_stay_aligned_from_row_to_row():
    file = io.StringIO()
    report = Report(file)
    for epoch, loss in ((1, 2.3), (10, 0.01)):
        report.epoch(ROW | {"epoch": epoch, "loss": loss, "test": 0.1})
    lines = file.getvalue().replace("grad norm", "grad_norm").replace(" %", "_%").splitlines()
    ends = [[word.end() for word in re.finditer(r"\S+", line)] for line in lines]
    assert len(ends) == 3 and ends[0] == ends[1] == ends[2]


def test_time_left_is_of_the_whole_run_and_counts_what_lies_between_steps(terminal: Terminal):
    with Report(terminal, clock=(clock := Clock())) as report:
        report.progress(1010, 2000, 1.0)  # a resumed run: the first thousand were not ours
        clock.now += 30  # 20 of them an evaluation's
        report.progress(1110, 2000, 1.0)
    assert terminal.frames[-1].endswith("4:27 left")  # 890 steps at 0.3 s


def test_the_bar_is_drawn_at_most_ten_times_a_second(terminal: Terminal):
    with Report(terminal, clock=(clock := Clock())) as report:
        for position in range(1, 1001):
            report.progress(position, 1000, 1.0)
            clock.now += 0.001
    # A frame more each time the bar is redrawn on being removed.
    assert 1 / REFRESH_SECONDS - 1 <= len(terminal.frames) <= 1 / REFRESH_SECONDS + 1


def test_no_thread_is_started(terminal: Terminal):
    before = threading.active_count()
    with Report(terminal) as report:
        report.progress(1, 2, 1.0)
        assert threading.active_count() == before


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_the_run_the_terminal_is_as_it_was(
    terminal: Terminal, ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors := Terminal())
    with pytest.raises(ending), Report() as report:
        report.progress(1, 2, 1.0)
        assert sys.stdout is not terminal
        raise ending
    assert sys.stdout is terminal and sys.stderr is errors
    assert terminal.getvalue().rfind(SHOW_CURSOR) > terminal.getvalue().rfind(HIDE_CURSOR)


def test_a_killed_run_leaves_the_cursor_to_be_seen(terminal: Terminal):
    report = Report(terminal)
    report.progress(1, 2, 1.0)
    try:
        assert terminal.getvalue().rfind(SHOW_CURSOR) > terminal.getvalue().rfind(HIDE_CURSOR)
    finally:
        report.__exit__()


def test_errors_that_go_to_a_file_stay_there(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with Report(terminal) as report:
        report.progress(1, 2, 1.0)
        print("a warning", file=sys.stderr)
    assert errors.getvalue() == "a warning\n" and "a warning" not in terminal.getvalue()


def test_the_result_of_many_members_is_their_mean_and_range():
    shares = (0.97, 0.98, 0.99)
    summaries = [
        SUMMARY | {"test": SUMMARY["test"] | {"accuracy": share, "loss": share}} for share in shares
    ]
    file = io.StringIO()
    Report(file).result(summaries, Path("runs/x"))
    assert file.getvalue().splitlines()[0] == (
        "test     mean 98.00 % of 3, 97.00 to 99.00 %, loss 0.9800; trained in 12.0 s"
    )


def test_a_quiet_report_says_nothing(terminal: Terminal):
    whole_run(Report(terminal, quiet=True))
    assert terminal.getvalue() == ""


def test_a_run_outlives_the_reader_of_its_lines():
    program = (
        "from mlp_research.terminal.report import Report; report = Report()\n"
        "for line in range(20_000): report.say(str(line))\n"
        "raise SystemExit(7)"
    )
    words = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 7


def test_standard_output_is_looked_up_when_it_is_written_to(capsys: pytest.CaptureFixture[str]):
    Report().say("here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599.4, "59:59"),
        (3600, "1:00:00"),
        (90_061, "25:01:01"),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_table_has_its_names_to_the_left_and_its_numbers_to_the_right():
    rows = [("a", "1", "1,000"), ("long name", "22", "1")]
    assert aligned(("class", "n", "rows"), rows) == [
        "class       n   rows",
        "a           1  1,000",
        "long name  22      1",
    ]
    assert aligned(("class", "n", "rows"), rows, left=2)[1] == "a          1   1,000"


def test_rich_is_imported_only_where_a_bar_is_drawn():
    program = (
        "import sys; from mlp_research.terminal.report import Report\n"
        "Report().progress(1, 2, 1.0); "
        "sys.exit(any(name.partition('.')[0] == 'rich' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
