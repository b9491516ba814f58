"""Every accepted config round-trips; every rejected value and every faulty document is named."""

import json
import shutil
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from mlp_research.base_config import LARGEST, SMALLEST, BaseConfig
from mlp_research.config import FAMILIES, FORMAT, Config, ConfigFileError, read_config
from mlp_research.errors import ConfigError
from mlp_research.fit import fit
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report
from scripts import evaluate
from tests.made import own_kinds, small_config, small_execution
from tests.processes import load_script

TRAIN = load_script("train")
TABLES: dict[type, dict[str, Any]] = {family: own_kinds(family) for family in FAMILIES.values()}
QUIET: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": (Phase.generate,),
    "suppress_health_check": [HealthCheck.too_slow],
}
Tally = Callable[[str, int, int, str], None]


def bounds_of(metadata: typing.Iterable[Any]) -> dict[str, Any]:
    """The bounds of a field: any of gt, ge, lt, le."""
    found: dict[str, Any] = {}
    for each in metadata:
        for part in getattr(each, "metadata", [each]):  # a pydantic Field holds several
            for name in ("gt", "ge", "lt", "le"):
                bound = getattr(part, name, None)
                if isinstance(part, annotated_types.BaseMetadata) and bound is not None:
                    found[name] = bound
    return found


def numbers(kind: type, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if kind is int:
        least = -(2**31) if low is None else low + ("gt" in bounds)
        most = 2**31 - 1 if high is None else high - ("lt" in bounds)
        return st.integers(least, most) | st.integers(least, min(most, least + 20))
    if high is None and low is not None:  # what float32 can hold
        positive = st.floats(max(low, SMALLEST), LARGEST, exclude_min=True)
        return positive | st.just(0.0) if bounds.get("ge") == 0 else positive
    return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)


def values_of(annotation: Any, metadata: typing.Iterable[Any]) -> st.SearchStrategy[Any]:
    """All that a field of this type accepts."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return values_of(inner[0], [*inner[1:], *metadata])
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each, metadata) for each in inner])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(values_of(inner[0], ()), max_size=4).map(tuple)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is str:  # paths of parameters
        return st.from_regex(r"[a-z]+(\[[0-9]\])?(\.[a-z]+)?", fullmatch=True)
    if annotation in TABLES:
        return st.one_of([configs_of(kind) for kind in TABLES[annotation].values()])
    if annotation in (int, float):
        return numbers(annotation, bounds_of(metadata))
    return configs_of(annotation)


def configs_of(kind: type[BaseConfig]) -> st.SearchStrategy[Any]:
    """All configs of a class, by its fields' types and bounds: a new field needs no line here."""
    return st.fixed_dictionaries(
        {name: values_of(f.annotation, f.metadata) for name, f in kind.model_fields.items()}
    ).map(lambda values: kind(**values))


CONFIGS = configs_of(Config)


def flags_of(config: BaseConfig, path: str = "") -> Iterator[str]:
    """The command line that says a whole config."""
    for name in type(config).model_fields:
        value, flag = getattr(config, name), f"{path}{name}".replace("_", "-")
        if isinstance(value, BaseConfig):
            yield from flags_of(value, f"{flag}.")
        elif name == "kind":
            yield from (f"--{path}kind", value)
        elif isinstance(value, bool):
            yield f"--{flag}" if value else f"--{path}no-{name.replace('_', '-')}"
        elif isinstance(value, tuple):
            yield from (f"--{flag}", *map(str, value))
        else:
            yield from (f"--{flag}", str(value) if value is None else repr(value).strip("'"))


@pytest.mark.parametrize("cases", [300, pytest.param(5_000, marks=pytest.mark.long)])
def test_every_accepted_config_round_trips_through_json(cases: int, tally: Tally):
    tried = []

    @settings(max_examples=cases, **QUIET)
    @given(CONFIGS)
    def round_trip(config: Config) -> None:
        text = json.dumps(config.to_json(), allow_nan=False)
        again = Config.from_json(text)
        assert again == config
        assert [*map(type, again.parts.values())] == [*map(type, config.parts.values())]
        assert json.dumps(again.to_json()) == text
        tried.append(config)

    round_trip()
    kinds = {(name, part.kind) for config in tried for name, part in config.parts.items()}
    assert kinds == {(name, kind) for name in FAMILIES for kind in TABLES[FAMILIES[name]]}
    tally("accepted config through JSON", len(tried), len(tried), "nothing: the equal config")


@pytest.mark.parametrize("cases", [40, pytest.param(2_000, marks=pytest.mark.long)])
def test_every_accepted_config_round_trips_through_flags(cases: int, tally: Tally):
    tried = []

    @settings(max_examples=cases, **QUIET)
    @given(CONFIGS)
    def round_trip(config: Config) -> None:
        words = [*flags_of(config), "--no-compile-cache"]
        _, flags = command_line.parse(command_line.RunFlags, words, "A round trip.")
        assert flags.config == config, words
        tried.append(config)

    round_trip()
    tally("accepted config through flags", len(tried), len(tried), "nothing: the equal config")


Leaf = tuple[tuple[str, ...], Any, FieldInfo]


def leaves(kind: type[BaseConfig], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """(path, config class of a table that it is in, field) of every number of a config."""
    for name, field in kind.model_fields.items():
        annotation: Any = field.annotation
        if annotation in TABLES:
            for each in TABLES[annotation].values():
                yield from leaves(each, (*path, name))
        elif isinstance(annotation, type) and issubclass(annotation, BaseConfig):
            yield from leaves(annotation, (*path, name))
        else:
            yield (*path, name), kind, field


LEAVES = [leaf for leaf in leaves(Config) if leaf[0][-1] != "kind"]
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def bare(annotation: Any, metadata: typing.Iterable[Any]) -> tuple[Any, dict[str, Any]]:
    """(type, bounds) of a field without None, and of the entries of a tuple."""
    inner = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) is typing.Annotated:
        return bare(inner[0], [*inner[1:], *metadata])
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return bare(inner[0], metadata)
    return annotation, bounds_of(metadata)


def rejected(field: FieldInfo) -> Iterator[tuple[Any, list[str]]]:
    """(value, words that its refusal must hold) of values that a field cannot have."""
    kind, bounds = bare(field.annotation, field.metadata)
    for name, bound in bounds.items():
        outside = {
            "gt": [bound, bound - 1, -(10**9)],
            "ge": [bound - 1, -(10**9)],
            "lt": [bound, bound + 1],
            "le": [2 * bound],
        }[name]
        for value in outside:
            yield value, [f"it must be {SIGNS[name]} {bound}"]
    if kind is float:
        yield from ((float(text), ["finite"]) for text in ("nan", "inf", "-inf"))
    if kind in (int, float):
        wrong = ["number" if kind is float else "integer"]
        yield from ((value, wrong) for value in ("many", {"a": 1}))
    if kind is int:
        yield 1.5, ["integer"]
    if kind is str:
        yield from ((value, ["string"]) for value in (3, {"a": 1}))
    if kind is bool:
        yield from ((value, ["boolean"]) for value in ("perhaps", 7))
    if get_origin(kind) is Literal:
        yield from ((value, [str(get_args(kind)[0])]) for value in ("cubic", 3))


def document_with(path: tuple[str, ...], owner: type[BaseConfig], value: Any) -> dict[str, Any]:
    """A config as JSON in which one field holds a value."""
    document: dict[str, Any] = {"format": FORMAT}
    inner = document
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    if "kind" in owner.model_fields:
        inner["kind"] = owner.model_fields["kind"].default
    inner[path[-1]] = value
    return document


def test_every_rejected_value_is_named_with_its_field_and_bound(tally: Tally):
    tried = 0
    for path, owner, field in LEAVES:
        is_tuple = get_origin(field.annotation) is tuple
        found = list(rejected(field))
        assert found, f"nothing is refused of {path}"
        for value, words in found:
            sound = "head" if path[-1] in ("freeze", "leaves") else 3
            text = json.dumps(document_with(path, owner, [sound, value] if is_tuple else value))
            with pytest.raises(ConfigError) as caught:
                Config.from_json(text)
            message, shown = str(caught.value), ".".join((*path, *(["1"] if is_tuple else [])))
            assert message.startswith(f"{shown} is "), message
            assert repr(value) in message or str(value) in message
            assert any(word in message for word in words), (message, words)
            assert "\n" not in message
            tried += 1
    tally("rejected value of a config", tried, tried, "the field, its value and its bound")


# What a document can hold that is no config, and a word of its refusal.
FOREIGN = {
    "nothing": ("", "not JSON"),
    "no JSON": ("seed: 3", "not JSON"),
    "two values": ("{} {}", "not JSON"),
    "a list": ("[]", "must be an object"),
    "null": ("null", "must be an object"),
    "a number": ("3", "must be an object"),
    "a long number": ('{"seed": ' + "9" * 10_000 + "}", "10000 digits"),
    "no format": ("{}", "format is None, but this version of mlp_research reads format 3"),
    "an earlier version's": ('{"train": {"label_smoothing": 0.1}}', "format is None, but this"),
    "another format": ('{"format": 2}', "format is 2, but this version of mlp_research reads"),
    "a format in words": ('{"format": "2"}', "format is '2', but this version of mlp_research"),
    "a large number": ('{"format": 3, "seed": ' + "9" * 400 + "}", "seed is 9999"),
    "not a number": (
        '{"format": 3, "optimizer": {"kind": "adam", "b1": NaN}}',
        "optimizer.b1 is nan",
    ),
    "infinity": (
        '{"format": 3, "optimizer": {"kind": "adam", "b1": -Infinity}}',
        "optimizer.b1 is -inf",
    ),
    "an abyss": ("[" * 100_000, "nested"),
    "an abyss of objects": ('{"model": ' * 100_000, "nested"),
    "self": ('{"format": 3, "self": 1}', "self is not a setting"),
    "self inside": ('{"format": 3, "train": {"self": 1}}', "train.self is not a setting"),
    "self in a kind": (
        '{"format": 3, "model": {"kind": "mlp", "self": 1}}',
        "model.self is not a setting",
    ),
    "an unknown field": ('{"format": 3, "ensemble": 3}', "ensemble is not a setting"),
    "an unknown field inside": (
        '{"format": 3, "train": {"accumulate": 2}}',
        "train.accumulate is not a",
    ),
    "an unknown model": (
        '{"format": 3, "model": {"kind": "wide"}}',
        "model.kind is 'wide': it must be one of",
    ),
    "an unknown rule": ('{"format": 3, "optimizer": {"kind": "muon"}}', "optimizer.kind is 'muon'"),
    "an unknown objective": (
        '{"format": 3, "objective": {"kind": "hinge"}}',
        "objective.kind is 'hinge'",
    ),
    "an unknown schedule": ('{"format": 3, "schedule": {"kind": "wsd"}}', "schedule.kind is 'wsd'"),
    "no kind": (
        '{"format": 3, "model": {"widths": [3]}}',
        "model.kind is missing: it must be one of",
    ),
    "a kind that is a list": ('{"format": 3, "model": {"kind": ["mlp"]}}', "model.kind is ['mlp']"),
    "a field that is null": ('{"format": 3, "train": null}', "train is None"),
    "a model that is null": (
        '{"format": 3, "model": null}',
        "model.kind is missing: it must be one of",
    ),
    "a model that is a number": ('{"format": 3, "model": 3}', "model.kind is missing"),
    "a model that is text": ('{"format": 3, "model": "wide"}', "model.kind is 'wide'"),
    "a field that is a list": ('{"format": 3, "train": []}', "train is []"),
    "data that are a list": ('{"format": 3, "data": []}', "data.kind is missing"),
    "a half character": ('{"format": 3, "model": {"kind": "\\ud800"}}', "model.kind is '\\ud800'"),
}


@pytest.mark.usefixtures("only_the_packages_kinds")
@pytest.mark.parametrize("name", FOREIGN)
def test_a_document_that_is_no_config_is_refused_in_words(name: str, tmp_path: Path):
    text, words = FOREIGN[name]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        read_config(tmp_path)
    assert words in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"\0" * 20, b"\x80"])
def test_a_config_in_another_encoding_is_refused_in_words(content: bytes, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigFileError, match="cannot be used"):
        read_config(tmp_path)


def test_a_config_cut_anywhere_is_refused_in_words(tmp_path: Path, tally: Tally):
    text = json.dumps(Config().to_json(), indent=2)
    path = tmp_path / "config.json"
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(ConfigFileError, match="not JSON"):
            read_config(tmp_path)
    tally("config.json cut at each byte", len(text), len(text), "config.json cannot be used")


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished small run."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    config = small_config(epochs=1)
    fit(config, small_execution(data_dir), run_dir=run_dir, report=Report(quiet=True))
    return run_dir


def ended(
    main: Callable[[Any], None],
    words: list[object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, str]:
    """(exit code, what was printed, white space folded) of a script."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words), "--no-compile-cache"])
    with pytest.raises(SystemExit) as exit:
        command_line.run(main)
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert "Traceback" not in text
    return int(exit.value.code or 0), text


def with_line(change: Callable[[dict], Any]) -> Callable[[str], str]:
    """A change of the JSON value that the last line holds."""

    def edit(text: str) -> str:
        *lines, last = text.splitlines()
        return "\n".join([*lines, json.dumps(change(json.loads(last)))]) + "\n"

    return edit


def whole(change: Callable[[Any], Any]) -> Callable[[str], str]:
    return lambda text: json.dumps(change(json.loads(text)))


def with_test(**fields: Any) -> Callable[[str], str]:
    return whole(lambda value: value | {"test": value["test"] | fields})


# File, how it is changed, the scripts that must refuse it, and a word of the refusal.
DOCUMENTS: list[tuple[str, Callable[[str], str], str, str]] = [
    *(
        ("config.json", lambda _, text=text: text, "train evaluate", words)
        for text, words in (FOREIGN[n] for n in ("an abyss", "self", "a long number", "a list"))
    ),
    ("result.json", lambda text: text[:-30], "evaluate", "cannot be read"),
    ("result.json", lambda _: "[" * 100_000, "evaluate", "cannot be read"),
    ("result.json", lambda _: "[]", "evaluate", "cannot be read"),
    ("result.json", lambda _: "3", "evaluate", "cannot be read"),
    ("result.json", whole(lambda value: {}), "evaluate", "cannot be read"),
    ("result.json", whole(lambda value: value | {"test": 3}), "evaluate", "cannot be read"),
    ("result.json", whole(lambda value: value | {"test": {"a": 1}}), "evaluate", "cannot be read"),
    ("result.json", with_test(loss="low"), "evaluate", "cannot be read"),
    ("result.json", with_test(loss=None), "evaluate", "cannot be read"),
    ("result.json", with_test(correct=[70]), "evaluate", "result.json"),
    ("result.json", with_test(correct=70, loss=float("nan")), "evaluate", "result.json says"),
    ("result.json", with_test(total=71), "evaluate", "result.json says"),
    ("metrics.jsonl", lambda text: text[: len(text) // 2], "train", "was changed"),
    ("metrics.jsonl", lambda _: "", "train", "was changed"),
    ("metrics.jsonl", with_line(lambda value: value | {"epoch": 2}), "train", "was changed"),
    ("metrics.jsonl", with_line(lambda value: [value]), "train", "was changed"),
    ("environment.json", lambda _: "{}", "train", "environment.json"),
    ("environment.json", lambda _: "3", "train", "environment.json"),
    ("environment.json", lambda _: "[3]", "train", "environment.json"),
    ("environment.json", lambda _: "[" * 100_000, "train", "environment.json"),
    ("environment.json", lambda text: text[:-30], "train", "environment.json"),
    *(
        ("environment.json", lambda _, text=text: text, "evaluate", "")
        for text in ("{}", "3", "[3]", '[{"execution": 3}]', '[{"execution": {"data_dir": 3}}]')
    ),
    (
        "environment.json",
        whole(lambda starts: [{"execution": {"data_dir": "a\0b"}}]),
        "evaluate",
        "data folder",
    ),
]


@pytest.mark.parametrize(
    ("file", "change", "script", "words"),
    [
        pytest.param(file, change, script, words, id=f"{number}-{file}-{script}")
        for number, (file, change, scripts, words) in enumerate(DOCUMENTS)
        for script in scripts.split()
    ],
)
def test_an_edited_document_of_a_run_is_refused_in_words_and_left_as_it_is(
    file: str,
    change: Callable[[str], str],
    script: str,
    words: str,
    trained: Path,
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    path = run_dir / file
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    place = ["--data.dir", data_dir] if file != "environment.json" or script == "train" else []
    if file == "result.json":
        saved = evaluate.Flags(run_dir)
        with pytest.raises(evaluate.RunFolderError, match=words):
            evaluate.agreement(saved, 12, evaluate.Evaluation(70, 70, 1.0, 0.5))
        return
    if script == "train":
        flags: list[object] = ["--resume", "--run-dir", run_dir, *place]
        main = TRAIN.main
    else:
        flags, main = [run_dir, *place, "--mesh.data", 1], evaluate.main
    code, text = ended(main, flags, capsys, monkeypatch)
    assert (code, words in text) == (1, True), text
    assert path.read_bytes() == before


def test_every_cut_of_a_result_is_refused_in_words(trained: Path, tmp_path: Path, tally: Tally):
    text = (trained / "result.json").read_text()
    flags = evaluate.Flags(run_dir=tmp_path)
    lines = (trained / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines)
    for length in range(len(text) - 2):
        (tmp_path / "result.json").write_text(text[:length])
        with pytest.raises(evaluate.RunFolderError, match="cannot be read"):
            evaluate.recorded(flags, 12)
    tally(
        "result.json cut at each byte", len(text) - 2, len(text) - 2, "result.json cannot be read"
    )
