"""The arrows of the house: a file imports only rooms that stand on a lower level."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    ["contracts", "errors", "shapes", "figures"],
    ["base_config", "prng"],
    ["parts"],
    ["data"],
    ["system"],
    ["checkpoints"],
    ["models", "augmentations"],
    ["objectives", "optimizers", "starts"],
    ["probes"],
    ["config", "step"],
    ["programs"],
    ["storage"],
    ["terminal"],
    ["run"],
    ["fit"],
    ["sweep", "analysis", "testing"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted((ROOT / "mlp_research").rglob("*.py"))


def room(path: Path) -> str:
    """The part of the house a file belongs to."""
    return path.relative_to(ROOT / "mlp_research").parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    """The parts of the package that a source imports, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "mlp_research":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlp_research."):
            rooms.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            rooms |= {name.split(".")[1] for name in names if name.startswith("mlp_research.")}
    return rooms


def upward(name: str, source: str) -> set[str]:
    """What a file of the room `name` imports that does not stand below it."""
    return {
        other for other in imported_rooms(source) if other != name and LEVEL[other] >= LEVEL[name]
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_arrow_points_down(path: Path):
    if path.name == "__init__.py" and path.parent.name == "mlp_research":
        return
    assert room(path) in LEVEL, f"{room(path)} has no level: give it one"
    assert not upward(room(path), path.read_text())


def test_an_upward_arrow_is_seen():
    assert upward("data", "from mlp_research.fit import fit") == {"fit"}
    assert upward("shapes", "def f():\n    from mlp_research import prng") == {"prng"}
    assert upward("fit", "from mlp_research.step import train_step\nimport numpy") == set()


def test_models_import_no_other_architecture():
    for path in (ROOT / "mlp_research" / "models").glob("*.py"):
        if path.name in ("__init__.py", "base.py", "summary.py"):
            continue
        modules = [
            node.module or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        architectures = [name for name in modules if name.startswith("mlp_research.models.")]
        assert set(architectures) <= {"mlp_research.models.base"}, path.name


def test_libraries_keep_their_files():
    """Grain and Orbax are each imported in one file only, matplotlib where pictures are drawn."""
    homes = {
        "grain": {"loader.py"},
        "orbax": {"checkpoint.py"},
        "matplotlib": {"figures.py", "curvature_figures.py", "per_example_figures.py"},
    }
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                allowed = homes.get(name.split(".")[0], {path.name})
                assert path.name in allowed, f"{path.name} imports {name}"
