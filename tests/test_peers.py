"""The same MLP in every framework takes the same steps, and the table about them is right."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from mlp_research.errors import ConfigError
from tests import processes

sys.path.insert(0, str(processes.ROOT / "scripts" / "peers"))
import lesson
import parity
import peer

RTOL = 1e-4
# torch 2.13.0 decorates its own code with what it has deprecated; its compiler imports that code.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def as_the_lesson_does() -> Iterator[None]:
    """The lesson broadcasts a bias over the rows of a batch."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def data() -> parity.Batches:
    return parity.batches(100)


@pytest.fixture(scope="module")
def raw(data: parity.Batches) -> tuple[Any, np.ndarray]:
    """The raw version after its steps in float64, and their losses."""
    with jax.numpy_rank_promotion("allow"):
        return parity.trained(peer.RAW, "float64", data)


@pytest.fixture
def raw_losses(raw: tuple[Any, np.ndarray]) -> np.ndarray:
    return raw[1]


def weights(precision: str = "float64") -> peer.Weights:
    return peer.he_weights(parity.SEED, precision)


def need(name: str) -> None:
    """Skip where a package of the peer is absent; import what warns where that is allowed."""
    for package in peer.PEERS[name].packages:
        pytest.importorskip(package, reason=f"{package} is absent: {peer.INSTALL}")


LONG = {
    name: [pytest.mark.long]
    for name in ("PyTorch compiled", "PyTorch eager", "Flax nnx", "raw JAX, pmap")
}
"""What takes long to compile. Some steps of each are in the table of parity, below."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG.get(name, [])) for name in peer.PEERS]
)
def test_every_peer_takes_the_steps_of_the_raw_version(
    name: str, data: parity.Batches, raw_losses: np.ndarray
):
    need(name)
    with parity.computing_in("float64"):
        by_epoch = peer.start(name, weights())
        losses = by_epoch.train_epoch(*by_epoch.place(data.images, data.labels), data.order)
        few = dataclasses.replace(data, order=data.order[:3])
        by_step = parity.trajectory(peer.start(name, weights()), few)
    assert len(losses) == 100 and losses[-1] < 0.2 * losses[0]
    np.testing.assert_allclose(losses, raw_losses, rtol=RTOL)
    np.testing.assert_allclose(by_step, losses[:3], rtol=1e-12)


@pytest.mark.parametrize("kind", ["Pmap", "ShardMap"])
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 4])
def test_any_number_of_devices_takes_the_single_devices_steps(
    kind: str, devices: int, data: parity.Batches, raw: tuple[Any, np.ndarray]
):
    """Moments of the gradient, too: Adam's steps hide a gradient that is a sum and not a mean."""
    spread = vars(importlib.import_module("data_parallel"))[kind]
    with parity.computing_in("float64"):
        many = spread(weights(), devices)
        losses = many.train_epoch(*many.place(data.images, data.labels), data.order)
        states = [(trained.parameters, trained.state) for trained in (raw[0], many)]
        if kind == "Pmap":
            states[1] = jax.tree.map(lambda leaf: leaf[-1], states[1])
    np.testing.assert_allclose(losses, raw[1], rtol=RTOL)
    for left, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["raw JAX, pmap", "raw JAX, shard_map"])
def test_a_batch_that_does_not_divide_is_refused(name: str, data: parity.Batches):
    spread = peer.start(name, weights("float32"))
    images, labels = spread.place(data.images, data.labels)
    with pytest.raises(ConfigError, match="a batch of 13 does not divide by 8 devices"):
        spread.step(images[:13], labels[:13])


def test_both_adams_add_epsilon_in_the_same_place():
    """To the root of the corrected moment: seen where the gradient is as small as epsilon."""
    torch = pytest.importorskip("torch", reason=f"torch is absent: {peer.INSTALL}")
    gradients = np.array([1e-8, -3e-8, 1e-9, 1.0])
    parameter = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([parameter], lr=1e-3)
    with parity.computing_in("float64"):
        parameters = jnp.zeros(4)
        state = lesson.optimizer.init(parameters)
        for factor in (1, 3, -2):
            parameter.grad = torch.from_numpy(factor * gradients)
            adam.step()
            updates, state = lesson.optimizer.update(jnp.asarray(factor * gradients), state)
            parameters = jnp.asarray(optax.apply_updates(parameters, updates))
        np.testing.assert_allclose(parameter.detach().numpy(), parameters, rtol=1e-9)


@pytest.mark.parametrize("widths", [(), (7,), (7, 5), (7, 5, 6)])
def test_the_lessons_depth_is_that_of_its_parameters(widths: tuple[int, ...]):
    parameters = lesson.init(jr.key(0), (12, *widths, lesson.CLASSES))
    images = np.random.default_rng(0).random((4, 12), dtype=np.float32)
    hidden = images
    for index, layer in enumerate(parameters.values()):
        hidden = hidden if index == 0 else np.maximum(hidden, 0)
        hidden = hidden @ np.asarray(layer["weight"]) + np.asarray(layer["bias"])
    assert len(parameters) == len(widths) + 1
    assert hidden.min() < 0  # a logit may be, so that a ReLU after the last layer would be seen
    np.testing.assert_allclose(lesson.forward(parameters, jnp.asarray(images)), hidden, rtol=1e-4)
    labels = jnp.arange(4)
    stepped, _, loss = lesson.step(
        parameters, lesson.optimizer.init(parameters), jnp.asarray(images), labels
    )
    assert lesson.loss(stepped, jnp.asarray(images), labels) < loss


def test_lines_of_code_are_neither_docstrings_nor_comments_nor_blank():
    source = '''"""A module."""
import math

# A comment.
rate = 1e-3


@math.cache
def area(radius):
    """One line.

    And more.
    """

    # Why.
    text = """not a
    docstring"""  # beside code
    return math.pi * radius**2


class Empty:
    """A class."""

    field: int = 0
    """What the field is."""
'''
    assert parity.source_lines(source, ("rate",)) == 1
    assert parity.source_lines(source, ("area",)) == 5
    assert parity.source_lines(source, ("rate", "area", "Empty")) == 8
    with pytest.raises(KeyError, match="volume"):
        parity.source_lines(source, ("volume",))


def test_an_absent_framework_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
):
    absent = peer.Entry("nothing", "Nothing", ("no_such_framework",))
    monkeypatch.setitem(peer.PEERS, "another", absent)
    with pytest.raises(ConfigError, match=r"no_such_framework.*pip install -e '\.\[peers\]'"):
        parity.measure()


def test_parity_shows_every_peer_in_a_table_and_a_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(parity, "STEPS", 5)  # so few that float32 amplifies no rounding yet
    monkeypatch.delitem(peer.PEERS, "PyTorch compiled")  # once more, a quarter of a minute
    for name in peer.PEERS:
        need(name)
    processes.load_script("benchmark").main(["parity", "--output", str(tmp_path / "new")])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ")][2:]
    assert [row[0].strip().removesuffix(" over 8") for row in rows] == list(peer.PEERS)
    for row in rows:
        assert int(row[3]) > 20 and float(row[4]) < RTOL and float(row[5]) < RTOL
    assert (tmp_path / "new" / "parity.png").read_bytes().startswith(b"\x89PNG")
