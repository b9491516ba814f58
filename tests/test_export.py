"""An exported model needs JAX alone, and gives bitwise the model's logits at any batch size."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.export import Exported
from jaxtyping import Array

from mlp_research.analysis import export as exporting
from mlp_research.analysis.export import ExportError
from mlp_research.analysis.saved_run import SavedRunFlags, open_run, restore
from mlp_research.data.inputs import Inputs
from mlp_research.fit import fit
from mlp_research.models import MLPConfig, Model, ModelConfig
from mlp_research.system import sharding
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report
from scripts import export
from tests.made import WitnessConfig, own_kinds, small_config, small_execution

SHAPE, PIXELS, CLASSES = (4, 4), 16, 3
KINDS = own_kinds(ModelConfig)
BATCH_SIZES = (1, 2, 37, 1000)
SMALL: dict[str, dict[str, Any]] = {
    "residual": {"width": 8},
    "mixer": {"patch_size": 2, "width": 8, "token_width": 4},
}


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run with dropout."""
    run_dir = tmp_path_factory.mktemp("exported") / "run"
    fit(small_config(), small_execution(data_dir), run_dir=run_dir, report=Report(quiet=True))
    return run_dir


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the script wrote of it."""
    folder = tmp_path_factory.mktemp("files")
    export.main([str(trained), "--output", str(folder), "--no-compile-cache"])
    return folder


@pytest.fixture(scope="module")
def jax_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with what jax and flatbuffers require, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    names, linked = ["jax", "flatbuffers"], set()
    while names:
        distribution = importlib.metadata.distribution(names.pop())
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in linked and top not in ("..", "__pycache__"):
                linked.add(top)
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
        for requirement in distribution.requires or ():
            found = re.match(r"[\w.-]+", requirement)
            if found and "extra ==" not in requirement:
                names.append(found[0])
    return folder


def run_alone(packages: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Python in a folder with the packages of another: site-packages are not looked at."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(packages), "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def made_images(rows: int, pixels: int = PIXELS) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, pixels)).astype(np.uint8)


def model_logits(model: Model, images: np.ndarray) -> np.ndarray:
    """The model under jit, written out: its own words and no others."""
    evaluated = eqx.nn.inference_mode(model)
    program = jax.jit(lambda images: jax.vmap(evaluated)(images.astype(jnp.float32) / 255))
    return np.asarray(program(images))


def restored(run_dir: Path) -> Model:
    flags = SavedRunFlags(run_dir, mesh_data=1, compile_cache=False)
    return restore(open_run(flags, evaluation_batch_size=16), flags).model


def made_model(kind: str) -> Model:
    config = KINDS[kind](**SMALL.get(kind, {}))
    return config.build(SHAPE, CLASSES, key=jr.key(7))


def exported_of(
    model: Model, pixels: int = PIXELS, platforms: Sequence[Any] = exporting.PLATFORMS
) -> Exported:
    return exporting.export(model, made_images(1, pixels), Inputs(), platforms)


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_gives_bitwise_the_models_logits_at_any_batch_size(kind: str):
    model = made_model(kind)
    exported = exported_of(model)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    loaded = exporting.deserialize(exporting.serialize(exported))
    for rows in BATCH_SIZES:
        images = made_images(rows)
        logits = np.asarray(loaded(images))
        assert logits.dtype == np.float32 and logits.shape == (rows, CLASSES)
        np.testing.assert_array_equal(logits, model_logits(model, images))


def test_the_default_mlp_gives_bitwise_its_logits():
    model = MLPConfig().build((28, 28), 10, key=jr.key(7))
    loaded = exporting.deserialize(exporting.serialize(exported_of(model, 784)))
    for rows in BATCH_SIZES:
        images = made_images(rows, 784)
        np.testing.assert_array_equal(loaded(images), model_logits(model, images))


def test_randomness_is_off():
    model = MLPConfig(widths=(8,), dropout=0.5).build(SHAPE, CLASSES, key=jr.key(7))
    loaded = exporting.deserialize(exporting.serialize(exported_of(model)))
    images = made_images(5)
    np.testing.assert_array_equal(loaded(images), loaded(images))
    np.testing.assert_array_equal(loaded(images), model_logits(model, images))


def test_an_export_of_a_model_on_eight_devices_asks_for_one():
    model, mesh = made_model("mlp"), sharding.device_mesh(8)
    spread = exported_of(sharding.place(model, sharding.replicated(mesh)))
    assert spread.nr_devices == 1
    logits = exporting.deserialize(exporting.serialize(spread))(made_images(37))
    assert len(logits.devices()) == 1
    np.testing.assert_array_equal(logits, model_logits(model, made_images(37)))


USE = """
import importlib.util
import numpy as np
from load import load

names = ("mlp_research", "equinox", "jaxtyping", "optax")
assert not [name for name in names if importlib.util.find_spec(name)]
images, logits = np.load("images.npy"), load()
for rows in (1, 2, 42):
    np.save(f"logits{rows}.npy", logits(images[:rows]))
"""


def test_it_is_loaded_where_there_is_jax_alone(exported: Path, trained: Path, jax_alone: Path):
    images = made_images(42, 12)
    np.save(exported / "images.npy", images)
    (exported / "use.py").write_text(USE)
    ended = run_alone(jax_alone, exported, "use.py")
    assert ended.returncode == 0, ended.stderr
    model = restored(trained)
    for rows in (1, 2, 42):
        found = np.load(exported / f"logits{rows}.npy")
        np.testing.assert_array_equal(found, model_logits(model, images[:rows]))


def test_the_written_loader_prints_the_predicted_classes(
    exported: Path, trained: Path, jax_alone: Path
):
    images = made_images(20, 12)
    np.save(exported / "twenty.npy", images)
    ended = run_alone(jax_alone, exported, "load.py", "twenty.npy")
    assert ended.returncode == 0, ended.stderr
    expected = model_logits(restored(trained), images).argmax(axis=1)
    assert ended.stdout.split() == [str(label) for label in expected]
    usage = run_alone(jax_alone, exported, "load.py")
    assert usage.returncode == 1 and "python load.py IMAGES.npy" in usage.stderr


def test_a_damaged_file_is_refused_by_the_loader(exported: Path, tmp_path: Path, jax_alone: Path):
    """JAX notices a cut, but not a changed parameter: that would be another model's answers."""
    content = (exported / exporting.MODEL_FILE).read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 0x40
    (tmp_path / "load.py").write_text((exported / "load.py").read_text())
    np.save(tmp_path / "images.npy", made_images(2, 12))
    for damaged in (bytes(changed), content[: len(content) // 2], b""):
        (tmp_path / exporting.MODEL_FILE).write_bytes(damaged)
        ended = run_alone(jax_alone, tmp_path, "load.py", "images.npy")
        assert ended.returncode != 0
        assert "is damaged, or not the model" in ended.stderr


def test_jax_itself_refuses_a_file_that_was_cut():
    content = exporting.serialize(exported_of(made_model("mlp")))
    for length in (0, 100, len(content) // 2, len(content) - 1000):
        with pytest.raises(Exception, match="requires a buffer of at least"):
            exporting.deserialize(content[:length])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, PIXELS - 1), np.uint8), "Shape mismatch"),
        (np.zeros(PIXELS, np.uint8), "Rank mismatch"),
        (np.zeros((2, PIXELS), np.float32), "Dtype mismatch"),
    ],
    ids=["pixels", "rank", "type"],
)
def test_wrong_images_are_refused_with_both_shapes(images: np.ndarray, message: str):
    content = exporting.serialize(exported_of(made_model("mlp")))
    with pytest.raises(ValueError, match=message):
        exporting.deserialize(content)(images)


def test_the_script_says_what_it_wrote_and_checks_it(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    before = {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}
    export.main([str(trained), "--no-compile-cache"])
    printed = " ".join(capsys.readouterr().out.split())
    test = json.loads((trained / "result.json").read_text())["test"]
    assert f"70 test rows, {test['correct']} right" in printed
    assert "bitwise the model's logits" in printed and "cpu, cuda, tpu" in printed
    names = {path.name for path in (trained / "export").iterdir()}
    assert names == {"model.jaxexport", "model.stablehlo.mlir", "load.py"}
    text = (trained / "export" / "model.stablehlo.mlir").read_text()
    assert "stablehlo.dot_general" in text and "tensor<?x12xui8>" in text
    assert before == {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}


def test_a_program_that_answers_otherwise_is_not_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = exporting.deserialize
    monkeypatch.setattr(
        exporting, "deserialize", lambda content: lambda images: 1.001 * plain(content)(images)
    )
    with pytest.raises(ExportError, match=r"differ from the model's by 0\.001 of the largest"):
        export.main([str(trained), "--output", str(tmp_path / "no"), "--no-compile-cache"])
    assert not (tmp_path / "no").exists()


def refusal(
    words: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """(exit code, message) of the script."""
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, words), "--no-compile-cache"])
    with pytest.raises(SystemExit) as ended:
        command_line.run(export.main)
    assert isinstance(ended.value.code, int)
    return ended.value.code, " ".join(capsys.readouterr().err.split())


def test_without_flatbuffers_it_says_what_to_install(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    for name in [name for name in sys.modules if name.split(".")[0] == "flatbuffers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    code, message = refusal([trained, "--output", tmp_path / "no"], capsys, monkeypatch)
    assert code == 1 and "pip install flatbuffers" in message
    assert not (tmp_path / "no").exists()


def test_a_folder_that_cannot_be_written_is_named(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "file").write_text("")
    code, message = refusal([trained, "--output", tmp_path / "file"], capsys, monkeypatch)
    assert code == 1 and f"{tmp_path / 'file'} cannot be written" in message


class Eigenvalues(eqx.Module):
    """A model with an operation that TPUs lack."""

    weight: Array

    def __call__(self, image: Array, /, *, key: Array | None = None) -> Array:
        values = jnp.linalg.eigvals(self.weight * image[:CLASSES, None])
        return values.real


def test_a_model_that_a_platform_cannot_run_is_refused_with_the_mend():
    model = Eigenvalues(jnp.eye(CLASSES))
    with pytest.raises(ExportError, match=r"for cpu, cuda, tpu: .*eig.*Name by --platforms only"):
        exported_of(model)
    loaded = exporting.deserialize(exporting.serialize(exported_of(model, platforms=["cpu"])))
    assert loaded(made_images(2)).shape == (2, CLASSES)


def test_a_models_training_only_callbacks_are_left_out():
    model = WitnessConfig().build(SHAPE, CLASSES, key=jr.key(7))
    assert exporting.serialize(exported_of(model))
