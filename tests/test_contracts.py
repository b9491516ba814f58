"""A broken contract says what came, what was wanted and the mend, wherever it breaks."""

import abc
import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Float, Float32, PyTree, UInt8, jaxtyped

from mlp_research import contracts, shapes
from mlp_research.base_config import BaseConfig
from mlp_research.contracts import Checked, ContractError, check, import_under_contracts
from mlp_research.data.batches import Split
from mlp_research.errors import ConfigError
from mlp_research.shapes import HostOrDevice, Image, Label, Logits, RandomKey, Scalar

contract: Callable[[Any], Any] = jaxtyped(typechecker=check)


def wrong(value: Any) -> Any:
    """The value, but unknown to the type checker, which would tell the mistake by itself."""
    return value


class Model(eqx.Module):
    """A stand-in for the package's models."""

    weight: Float[Array, "classes pixels"]

    @property
    def pixels(self) -> int:
        return self.weight.shape[-1]

    @property
    def classes(self) -> int:
        return self.weight.shape[-2]

    @contract
    def __call__(
        self, image: Float[Array, " {self.pixels}"], /, *, key: RandomKey | None = None
    ) -> Float[Array, " {self.classes}"]:
        return self.weight @ image


@contract
def counted(labels: shapes.Labels) -> int:
    return len(labels)


@contract
def accuracy(
    images: UInt8[HostOrDevice, "batch pixels"], labels: UInt8[HostOrDevice, " batch"]
) -> Scalar:
    return jnp.float32(len(images) + len(labels))


@contract
def cross_entropy(logits: Logits, label: Label) -> Float[Array, ""]:
    return -jax.nn.log_softmax(logits)[label]


@contract
def distance(
    logits: Float[Array, "batch classes"], targets: Float[Array, "batch classes"]
) -> Float[Array, " batch"]:
    return ((logits - targets) ** 2).sum(-1)


@contract
def total(values: Float32[Array | np.ndarray, " batch"]) -> float:
    return float(values.sum())


@contract
def dropout(image: Image, key: RandomKey) -> Image:
    return jnp.where(jr.bernoulli(key, 0.5, image.shape), image, 0)


@contract
def run_chunk(
    chunk: tuple[UInt8[Array, "steps batch pixels"], UInt8[Array, "steps batch"]],
) -> int:
    return len(chunk[0])


MODEL = Model(jnp.ones((10, 784)))
KEY = jr.key(0)


def floats(*shape: int) -> Array:
    return jnp.ones(shape)


def raw(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.uint8)


# What is at fault | what came | what was wanted | what mends it.
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch for one example": (
        lambda: MODEL(floats(128, 784)),
        "argument `image` | float32[128,784] | Float[784] | batch of 128 | use jax.vmap",
    ),
    "an image that is not flat": (
        lambda: MODEL(floats(28, 28)),
        "argument `image` | float32[28,28] | Float[784] | Flatten it: image.reshape(784)",
    ),
    "a batch of images that are not flat": (
        lambda: MODEL(floats(128, 28, 28)),
        "argument `image` | float32[128,28,28] | Float[784] | jax.vmap on image.reshape(128, 784)",
    ),
    "raw pixels for floats": (
        lambda: MODEL(raw(784)),
        "argument `image` | uint8[784] | Float[784] | image.astype(jnp.float32) / 255",
    ),
    "floats for raw pixels": (
        lambda: accuracy(floats(128, 784), raw(128)),
        "argument `images` | float32[128,784] | UInt8[batch pixels] | uint8 from 0 to 255",
    ),
    "logits of another class count": (
        lambda: distance(floats(8, 10), floats(8, 7)),
        "argument `targets` | float32[8,7] | Float[batch classes] | classes = 10 | same classes",
    ),
    "labels as one-hot rows": (
        lambda: accuracy(raw(128, 784), floats(128, 10)),
        "argument `labels` | float32[128,10] | UInt8[batch] | one-hot | labels.argmax(-1)",
    ),
    "labels of other rows": (
        lambda: accuracy(raw(128, 784), raw(64)),
        "argument `labels` | uint8[64] | UInt8[batch] where batch = 128 (bound by"
        " earlier arguments) | batch is 64 here, 128 there | same rows",
    ),
    "labels of rational type": (
        lambda: counted(floats(128)),
        "argument `labels` | float32[128] | wanted UInt8[batch] | Int32[batch]",
    ),
    "a legacy key": (
        lambda: dropout(floats(784), jr.PRNGKey(0)),
        "argument `key` | uint32[2] | Key[] | legacy | jax.random.key(seed)",
    ),
    "a seed for a key": (
        lambda: dropout(floats(784), 0),
        "argument `key` | int 0 | Key[] | jax.random.key(seed)",
    ),
    "a NumPy array": (
        lambda: MODEL(np.ones(784, np.float32)),
        "argument `image` | numpy float32[784] | Float[784] | jnp.asarray(image)",
    ),
    "a list for an array": (
        lambda: MODEL([0.0, 1.0]),
        "argument `image` | [float 0.0, float 1.0] | Float[784] | jnp.asarray(image)",
    ),
    "a list for a tuple": (
        lambda: run_chunk([raw(3, 2, 4), raw(3, 2)]),
        "argument `chunk` | [uint8[3,2,4], uint8[3,2]] | tuple[UInt8[steps | tuple(chunk)",
    ),
    "double precision": (
        lambda: total(np.ones(3)),
        "argument `values` | numpy float64[3] | Float32[batch] | values.astype(jnp.float32)",
    ),
}


def missing(words: str, text: str) -> list[str]:
    return [word for word in words.split(" | ") if word not in text]


def broken(call: Callable[[], Any]) -> str:
    with pytest.raises(ContractError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_argument_what_came_what_was_wanted_and_mend(mistake: str):
    call, words = MISTAKES[mistake]
    text = broken(call)
    assert missing(words, text) == [], text
    assert text.startswith(f"{__name__}.") and "\n" not in text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dropout(floats(28, 28), KEY), "jax.vmap | If it is one example | reshape(784)"),
        (lambda: dropout(floats(784), jr.split(KEY, 3)), "key<fry>[3] | batch of 3 | jax.vmap"),
        (lambda: MODEL(KEY), "key<fry>[] | order of the arguments"),
        (lambda: MODEL(floats(783)), "pixels is 783 here, 784 there"),
        (lambda: accuracy(raw(784), raw(1)), "uint8[784] | images[None]"),
        (lambda: accuracy(raw(128, 784), raw(128, 1)), "Flatten it: labels.reshape(128)"),
        (lambda: accuracy(raw(3, 2), jnp.zeros(3, jnp.int32)), "labels.astype(jnp.uint8)"),
        (lambda: cross_entropy(floats(10), raw(128)), "Integer[] | batch of 128 | jax.vmap"),
        (lambda: cross_entropy(floats(10), floats(10)), "label.argmax(-1)"),
        (lambda: run_chunk((raw(3, 2, 4), raw(3, 1))), "`chunk[1]` | steps = 3, batch = 2"),
        (lambda: run_chunk((raw(3, 2, 4),)), "(uint8[3,2,4]) | tuple[UInt8[steps batch pixels]"),
        (lambda: Split(wrong(raw(5, 4)), np.zeros(5, np.uint8)), "JAX array | np.asarray(images)"),
        (lambda: dropout(None, KEY), "is None | Float[pixels]"),
        (lambda: MODEL(Model), "the class Model"),
    ],
)
def test_the_mend_fits_what_came(call: Callable[[], Any], words: str):
    text = broken(call)
    assert missing(words, text) == [], text


def test_what_is_right_passes():
    assert MODEL(floats(784), key=KEY).shape == (10,)
    assert jax.vmap(MODEL)(floats(3, 784)).shape == (3, 10)
    assert accuracy(np.zeros((3, 4), np.uint8), raw(3)) == 6
    assert run_chunk((raw(3, 2, 4), raw(3, 2))) == 3


def test_an_int_is_welcome_where_a_float_is_wanted():
    @contract
    def double(rate: float) -> float:
        return 2 * rate

    assert double(1) == 2
    assert "is str '1', wanted float" in broken(lambda: double("1"))


def losses(model: Model, images: Array) -> Array:
    return jax.vmap(model)(images).sum()


@pytest.mark.parametrize(
    "transformed",
    [
        jax.jit(jax.vmap(MODEL)),
        eqx.filter_jit(lambda images: jax.vmap(MODEL)(images)),
        eqx.filter_jit(eqx.filter_vmap(MODEL)),
        lambda images: jax.jit(jax.grad(losses, argnums=1))(MODEL, images),
        lambda images: eqx.filter_jit(eqx.filter_value_and_grad(losses))(MODEL, images),
        lambda images: jax.lax.scan(lambda carry, image: (carry, MODEL(image)), 0, images),
        eqx.filter_jit(lambda images: jax.lax.map(eqx.filter_checkpoint(MODEL), images)),
    ],
    ids=["jit", "filter_jit", "filter_vmap", "grad", "filter_grad", "scan", "checkpoint"],
)
def test_the_text_is_the_same_under_transformations(transformed: Callable[[Array], Any]):
    transformed(floats(3, 784))
    assert broken(lambda: transformed(floats(3, 28, 28))) == broken(lambda: MODEL(floats(28, 28)))


def test_compiled_code_is_not_checked_again():
    traced = eqx.filter_jit(MODEL)
    traced(floats(784))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contracts, "_call_paragraph", None)  # a check that fails would call it
        patch.setattr(Model, "pixels", 3)
        traced(floats(784))


def test_a_wrong_result_is_told_as_a_result():
    @contract
    def column(values: Float[Array, " rows"]) -> Float[Array, " rows"]:
        return values[:, None]

    @contract
    def halves(values: Float[Array, " rows"]) -> tuple[Float[Array, " rows"], int]:
        return values[1:], 2

    @contract
    def repeat(values: Float[Array, " rows"]) -> Float[Array, " rows"]:
        return jnp.stack([values, values])

    assert "vmap" not in broken(lambda: repeat(floats(3)))
    text = broken(lambda: column(floats(3)))
    assert "column: the result is float32[3,1], wanted Float[rows] where rows = 3" in text
    assert "(bound by the arguments). Flatten it: result.reshape(3)." in text
    assert "the result[0] is float32[2], wanted Float[rows] where rows = 3" in broken(
        lambda: eqx.filter_jit(halves)(floats(3))
    )


def test_gathered_arguments_are_told_by_place_and_by_name():
    @contract
    def join(*parts: Float[Array, " rows"], **named: Float[Array, " rows"]) -> None:
        return None

    join(floats(3), floats(3), last=floats(3))
    assert "`parts[1]` is float32[4]" in broken(lambda: join(floats(3), floats(4)))
    assert "`named` is dict" in broken(lambda: join(floats(3), last=floats(4)))


def test_the_error_is_a_plain_type_error_without_a_cause():
    with pytest.raises(TypeError) as caught:
        eqx.filter_jit(MODEL)(floats(28, 28))
    error = caught.value
    assert type(error) is ContractError
    assert error.__cause__ is None and "jaxtyping" not in str(getattr(error, "__notes__", []))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ContractError and str(copy) == str(error)


def test_an_annotation_is_looked_up_and_never_evaluated():
    @contract
    def twice(model: Model, image: Float[Array, " 2*{model.pixels}"]) -> None:
        return None

    @contract
    def counted(widths: list, image: Float[Array, " {len(widths)}"]) -> None:
        return None

    @contract
    def sized(image: Float[Array, " {size}"], size: int = 4) -> None:
        return None

    assert "wanted Float[4]" in broken(lambda: sized(floats(3)))
    assert "wanted Float[2*784]" in broken(lambda: twice(MODEL, floats(3)))
    assert "wanted Float[{len(widths)}]" in broken(lambda: counted([1], floats(3)))


def test_an_unresolvable_annotation_is_left_unchecked():
    def unresolved(image: "Missing", other: "list[Missing]", right: Float[Array, " n"]) -> "Gone":  # pyright: ignore
        return image

    checked = contract(unresolved)
    assert checked(1, 2, floats(3)) == 1
    assert "argument `right`" in broken(lambda: checked(1, 2, floats(3, 3)))


def test_a_pytree_is_checked_leaf_by_leaf():
    @contract
    def shared(tree: PyTree[Float[Array, " rows"]]) -> None:
        return None

    shared({"a": floats(3), "b": floats(3)})
    text = broken(lambda: shared((floats(3), floats(4))))
    assert "wanted PyTree[Float[rows]]" in text


class Dense(Checked):
    """A user's layer, with an `__init__` of its own."""

    weight: Float[Array, "out inputs"]
    bias: Float[Array, " out"]
    inputs: int = eqx.field(static=True)

    def __init__(self, inputs: int, out: int, *, key: RandomKey, bias: Any = None):
        self.weight = jr.normal(key, (out, inputs))
        self.bias = jnp.zeros(out) if bias is None else bias
        self.inputs = inputs

    def __call__(self, image: Float[Array, " {self.inputs}"]) -> Float[Array, " out"]:
        return self.weight @ image + self.bias


class Scaled(Checked):
    scale: Float[Array, " n"] = eqx.field(converter=jnp.asarray)
    shift: Float[Array, " n"]
    levels: tuple[Float[Array, " n"], ...] = ()
    depth: int = 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Dense(3, 4, key=KEY, bias=floats(5)),
            "Dense.bias is float32[5], wanted Float[out] where out = 4 (bound by earlier fields).",
        ),
        (lambda: Dense(3, 4, key=KEY, bias=raw(4)), "Dense.bias is uint8[4] | astype"),
        (lambda: Dense(3, 4, key=KEY, bias=floats(4, 1)), "Dense.bias is float32[4,1] | Flatten"),
        (lambda: Dense(3, 4, key=KEY, bias=[0.0]), "Dense.bias is [float 0.0] | jnp.asarray"),
        (lambda: Scaled([1, 2], floats(2)), "Scaled.scale is int32[2], wanted Float[n]"),
        (lambda: Scaled([1.0], floats(2)), "Scaled.shift is float32[2] | where n = 1"),
        (
            lambda: Scaled([1.0], floats(1), (floats(1), floats(3))),
            "Scaled.levels[1] is float32[3]",
        ),
        (lambda: Scaled([1.0], floats(1), depth=wrong("2")), "Scaled.depth is str '2', wanted int"),
        (
            lambda: dataclasses.replace(Scaled([1.0], floats(1)), shift=floats(7)),
            "Scaled.shift is float32[7] | where n = 1",
        ),
    ],
)
def test_checked_fields_must_hold_after_any_init(call: Callable[[], Any], words: str):
    text = broken(call)
    assert missing(words, text) == [], text
    assert broken(eqx.filter_jit(call)) == text


def test_a_checked_model_is_made_abstractly_vmapped_compiled_and_mended():
    model = Dense(3, 4, key=KEY)
    abstract = eqx.filter_eval_shape(lambda key: Dense(3, 4, key=key), KEY)
    assert abstract.weight.shape == (4, 3)
    many = eqx.filter_vmap(lambda key: Dense(3, 4, key=key))(jr.split(KEY, 5))
    assert many.weight.shape == (5, 4, 3)
    assert eqx.filter_vmap(lambda one, image: one(image), in_axes=(0, None))(many, floats(3)).shape
    assert eqx.filter_jit(lambda: Dense(3, 4, key=KEY))().bias.shape == (4,)
    assert jax.tree.map(lambda leaf: leaf, model) == model
    assert eqx.tree_at(lambda dense: dense.bias, model, floats(4)).bias.sum() == 4
    assert pickle.loads(pickle.dumps(model)) == model


def test_a_checked_call_is_told_as_the_package_tells_it():
    model = Dense(784, 10, key=KEY)
    text = broken(lambda: model(floats(128, 784)))
    assert text.startswith(f"{__name__}.Dense.__call__: argument `image` is float32[128,784]")
    assert broken(lambda: eqx.filter_jit(model)(floats(128, 784))) == text
    assert "use jax.vmap" in text


T = TypeVar("T")


class Layer(Checked, Generic[T]):
    content: T

    @abc.abstractmethod
    def __call__(self, image: Image) -> Image:
        """To be written by each layer."""


class Doubled(Layer[Array]):
    def __call__(self, image: Image) -> Image:
        return 2 * image


class Inherited(Doubled):
    depth: int = 1


def test_abstract_and_inherited_calls_keep_their_meaning():
    with pytest.raises(TypeError, match="abstract"):
        Layer(floats(1))  # pyright: ignore[reportAbstractUsage]
    assert Inherited(floats(1))(floats(3)).sum() == 6
    assert "Doubled.__call__: argument" in broken(lambda: Inherited(floats(1))(floats(3, 3)))


def test_a_call_that_is_already_checked_is_not_wrapped_twice():
    class Hooked(Checked):
        @contract
        def __call__(self, image: Image) -> Image:
            return image

    assert not hasattr(wrong(Hooked.__call__).__wrapped__, "__wrapped__")


def test_fields_know_the_other_fields_by_self():
    class Square(Checked):
        side: int
        values: Float[Array, " {self.side}"]

    Square(3, floats(3))
    assert "Square.values is float32[4], wanted Float[3]" in broken(lambda: Square(3, floats(4)))


def test_string_annotations_are_checked_and_unresolvable_ones_are_not():
    class Tree(Checked):
        value: "Float[Array, ' n']"
        child: "Tree | None"
        other: "Missing"  # pyright: ignore

    class Loose(Scaled):
        shift: "Missing"  # pyright: ignore

    assert Loose([1.0], wrong("anything")).scale == 1
    tree = Tree(floats(2), Tree(floats(3), None, 0), 0)
    assert "Tree.child is int 3, wanted Tree | None" in broken(lambda: Tree(floats(2), wrong(3), 0))
    assert "Tree.value is float32[2,2]" in broken(lambda: Tree(floats(2, 2), tree, 0))


OWN_FILE = """
    import dataclasses
    from typing import Literal

    import equinox as eqx
    import jax.random as jr
    from jaxtyping import Array, Float
    from pydantic import field_validator

    from mlp_research.base_config import BaseConfig


    class Linear(eqx.Module):
        weight: Float[Array, "classes pixels"]
        scale: Float[Array, " classes"]

        def __call__(self, image: Float[Array, " pixels"], *, key=None) -> Float[Array, " classes"]:
            return self.scale * (self.weight @ image)


    class LinearConfig(BaseConfig, frozen=True):
        kind: Literal["linear"] = "linear"
        child: "LinearConfig | None" = None
        gain: float = 1.0

        @field_validator("gain")
        @classmethod
        def positive(cls, gain: float) -> float:
            if gain <= 0:
                raise ValueError("it must be > 0")
            return gain

        def build(self, image_shape: tuple[int, int], classes: int, *, key) -> Linear:
            pixels = image_shape[0] * image_shape[1]
            weight = self.gain * jr.normal(key, (classes, pixels))
            return Linear(weight, jr.normal(key, (classes,)))


    @dataclasses.dataclass
    class Note:
        text: "str"
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own_models.py"
    path.write_text(textwrap.dedent(OWN_FILE))
    yield path
    sys.modules.pop("own_models", None)


def test_a_file_imported_by_path_is_under_contracts(own_file: Path):
    module = import_under_contracts(own_file, "own_models")
    assert sys.modules["own_models"] is module and module.__file__ == str(own_file)
    model = module.LinearConfig(child=module.LinearConfig()).build((2, 2), 3, key=KEY)
    assert model(floats(4)).shape == (3,)
    assert "own_models.Linear.__init__: argument `scale` is float32[4]" in broken(
        lambda: module.Linear(floats(3, 4), floats(4))
    )
    assert "own_models.Linear.__call__: argument `image` is float32[2,2]" in broken(
        lambda: eqx.filter_jit(model)(floats(2, 2))
    )
    assert "LinearConfig.build: argument `image_shape` is [int 2, int 2]" in broken(
        lambda: module.LinearConfig().build([2, 2], 3, key=KEY)
    )
    with pytest.raises(ConfigError, match="gain: it must be > 0"):
        module.LinearConfig(gain=-1)
    assert pickle.loads(pickle.dumps(model)) == model
    assert "text" in broken(lambda: module.Note(3))


def test_a_file_imported_with_contracts_off_is_plain(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLP_RESEARCH_CONTRACTS", "off")
    module = import_under_contracts(own_file, "own_models")
    assert module.Linear(floats(3, 4), floats(4)).scale.shape == (4,)
    monkeypatch.setenv("MLP_RESEARCH_CONTRACTS", "on")
    assert import_under_contracts(own_file, "own_models") is not module
    broken(lambda: sys.modules["own_models"].Linear(floats(3, 4), floats(4)))


def test_a_file_that_cannot_be_imported_is_refused_in_words(own_file: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.py is not a Python file"):
        import_under_contracts(own_file.parent / "none.py", "none")
    with pytest.raises(ImportError, match=r"own_models\.py cannot be loaded as json"):
        import_under_contracts(own_file, "json")
    own_file.write_text("raise RuntimeError('mine')")
    with pytest.raises(RuntimeError, match="mine"):
        import_under_contracts(own_file, "own_models")
    assert "own_models" not in sys.modules


PROBE = """
    import equinox as eqx
    import jax.numpy as jnp
    import numpy as np
    from jaxtyping import Array, Float, jaxtyped

    from mlp_research.contracts import Checked, ContractError
    from mlp_research.prng import stream_key
    from mlp_research.data.batches import Split


    class Own(Checked):
        bias: Float[Array, " n"]

        def __call__(self, image: Float[Array, " n"]) -> Float[Array, " n"]:
            return image


    def told(call):
        try:
            call()
        except ContractError:
            return "told"
        except Exception as error:
            return type(error).__name__
        return "passed"


    print(told(lambda: Split(np.zeros(3), 0)), told(lambda: stream_key("1", "init")))
    print(told(lambda: Own(0)), told(lambda: Own(jnp.zeros(2))(0)))
    print(hasattr(Own.__call__, "__wrapped__"), hasattr(Split.__init__, "__wrapped__"))
"""


def run_with(choice: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in os.environ if name != "MLP_RESEARCH_CONTRACTS"}
    environment = inherited | choice | {"PYTHONPATH": str(Path(contracts.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_contracts_are_on_by_default():
    assert run_with({}, PROBE).stdout.split() == [*["told"] * 4, "True", "True"]


def test_contracts_off_leave_everything_plain():
    result = run_with({"MLP_RESEARCH_CONTRACTS": "off"}, PROBE)
    assert result.stdout.split() == ["passed", "TypeError", "passed", "passed", "False", "False"]


def test_another_choice_than_on_and_off_is_refused():
    result = run_with({"MLP_RESEARCH_CONTRACTS": "0"}, "import mlp_research")
    assert result.returncode == 1
    expected = 'ValueError: MLP_RESEARCH_CONTRACTS is \'0\': it must be "on" or "off"'
    assert result.stderr.splitlines()[-1] == expected


def test_what_pydantic_validates_is_not_checked_twice():
    plain = {f"mlp_research.{name}" for name in ("contracts", "base_config", "config")}
    assert plain.isdisjoint(contracts.CHECKED_MODULES)
    assert not hasattr(wrong(BaseConfig.__init__), "__wrapped__")
    assert hasattr(wrong(Split.__init__), "__wrapped__")
