"""Shape contracts: jaxtyping and beartype, with one paragraph for people when one is broken.

jaxtyping's import hook hands the functions of `CHECKED_MODULES` to `check`, whose checks run when a
function is called or traced: compiled code holds none. MLP_RESEARCH_CONTRACTS=off leaves all plain.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import math
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype, door, roar
from jaxtyping._import_hook import Typechecker, _JaxtypingLoader  # no public way takes a path

TYPECHECKER = "mlp_research.contracts.check"
UNCHECKED = ("base_config", "config", "contracts", "errors", "parts")
"""Modules that pydantic validates, and those that the checks themselves need."""
CHECKED_MODULES = tuple(
    f"mlp_research.{module.name}"
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name not in UNCHECKED
)
_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)  # as for pyright, an int is a float

_Fault = tuple[str, Any, Any]  # a value's name, the value, the annotation that refuses it
_Axes = list[tuple[str, int | None]]  # names and sizes, None where any will do
_ADVICE = {
    "batch": ": both must come from the same rows",
    "classes": ": model and data must mean the same classes",
    "pixels": ": model and data must mean the same image size",
}


class ContractError(jaxtyping.AnnotationError, TypeError):
    """A broken contract, in one paragraph. jaxtyping passes its own `AnnotationError` unwrapped."""


def enabled() -> bool:
    """Whether contracts are on. Raises `ValueError` for a choice other than on and off."""
    choice = os.environ.get("MLP_RESEARCH_CONTRACTS", "on")
    if choice not in ("on", "off"):
        raise ValueError(f'MLP_RESEARCH_CONTRACTS is {choice!r}: it must be "on" or "off"')
    return choice == "on"


def install() -> None:
    """Check the functions of `CHECKED_MODULES`, which must not be imported yet."""
    if enabled():
        jaxtyping.install_import_hook(CHECKED_MODULES, TYPECHECKER)


def import_under_contracts(path: Path, module_name: str) -> types.ModuleType:
    """Run a Python file as the module `module_name`, checked as the package's own modules are.

    A second call runs the file again. Raises `FileNotFoundError` where there is no such file and
    `ImportError` where the name is another module's; what the file itself raises passes.
    """
    path = path.resolve()
    if not path.is_file() or path.suffix != ".py":
        raise FileNotFoundError(f"{path} is not a Python file: give the path of one, *.py")
    if getattr(sys.modules.get(module_name), "__file__", str(path)) != str(path):
        raise ImportError(f"{path} cannot be loaded as {module_name}: another module has this name")
    checker = Typechecker(TYPECHECKER)
    loader = _JaxtypingLoader(module_name, str(path), typechecker=checker) if enabled() else None
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pydantic look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def check(function: Callable) -> Callable:
    """The typechecker for `jaxtyped` and its import hook: beartype, but raising `ContractError`."""
    if not inspect.get_annotations(function):
        return function
    # At the first call: a start pays only for the functions it uses.
    checker = functools.cache(lambda: beartype(conf=_BEARTYPE)(function))

    @functools.wraps(function)
    def contract(*args, **kwargs):
        __tracebackhide__ = True  # pytest then points at the caller
        try:
            return checker()(*args, **kwargs)
        except roar.BeartypeCallHintViolation as violation:
            paragraph = _call_paragraph(function, args, kwargs, violation)
        raise ContractError(paragraph)

    return contract


class Checked(eqx.Module):
    """A base for modules of your own, in notebooks and files which no hook reaches.

    All fields are checked together after any `__init__` and converter, and `__call__` at each call
    unless it is no plain function, as under `eqx.filter_jit`. `eqx.tree_at` checks nothing.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        call = cls.__dict__.get("__call__")
        by_hook = getattr(call, "__globals__", None) is jaxtyping.jaxtyped.__globals__
        if inspect.isfunction(call) and not by_hook and enabled():
            cls.__call__ = jaxtyping.jaxtyped(call, typechecker=check)

    @jaxtyping.jaxtyped(typechecker=lambda function: function)  # one scope for all fields
    def __check_init__(self):
        hints = _field_hints(type(self)) if enabled() else {}
        names = [field.name for field in dataclasses.fields(self) if field.name in hints]
        fault = _first_fault((name, getattr(self, name), hints[name]) for name in names)
        if fault is not None:
            subject = f"{type(self).__qualname__}.{fault[0]}"
            raise ContractError(_paragraph(subject, fault, {"self": self}, "earlier fields"))


@functools.cache
def _field_hints(cls: type) -> dict[str, Any]:
    """The fields' annotations but those that name what is not there: such fields go unchecked."""
    hints = {}
    for base in reversed(cls.__mro__):
        module = vars(sys.modules.get(base.__module__, typing))
        for name, annotation in inspect.get_annotations(base).items():
            hints.pop(name, None)
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            with contextlib.suppress(Exception):  # text may raise anything when it is evaluated
                hints |= get_type_hints(holder, module, {base.__name__: base}, include_extras=True)
    return hints


def _call_paragraph(function: Callable, args: tuple, kwargs: dict, violation: Exception) -> str:
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    if isinstance(violation, roar.BeartypeCallHintReturnViolation):
        # jaxtyping hands over a stand-in that does nothing but give back the result put into it.
        items = [("result", function(*args, **kwargs), signature.return_annotation)]
        subject, bound_by = "the {}", "the arguments"
    else:
        hints = {name: _argument_hint(signature.parameters[name]) for name in bound.arguments}
        items = [(name, bound.arguments[name], hint) for name, hint in hints.items()]
        subject, bound_by = "argument `{}`", "earlier arguments"
    fault = _first_fault(items)
    place = f"{function.__module__}.{function.__qualname__}"
    if fault is None:  # beartype tries one random item of a container, and may have tried another
        return f"{place}: {' '.join(str(violation).split())}"
    bound.apply_defaults()
    return _paragraph(f"{place}: {subject.format(fault[0])}", fault, bound.arguments, bound_by)


def _argument_hint(parameter: inspect.Parameter) -> Any:
    hint, kind = parameter.annotation, parameter.kind
    several = {kind.VAR_POSITIONAL: tuple[hint, ...], kind.VAR_KEYWORD: dict[str, hint]}
    return Any if hint is parameter.empty else several.get(kind, hint)


def _first_fault(items: Iterable[_Fault]) -> _Fault | None:
    """The first value refused in jaxtyping's present scope; of a tuple or list, the item."""
    for name, value, hint in items:
        fault, origin, hints = None, typing.get_origin(hint), typing.get_args(hint)
        if origin in (tuple, list) and isinstance(value, origin):  # all items, not one by chance
            hints = hints[:1] * len(value) if origin is list or hints[1:] == (...,) else hints
            names = [f"{name}[{index}]" for index in range(len(value))]
            whole = None if len(hints) == len(value) else (name, value, hint)
            fault = whole or _first_fault(zip(names, value, hints, strict=True))
        else:
            with contextlib.suppress(roar.BeartypeException):  # an unreadable hint: unchecked
                bears = door.is_bearable(value, hint, conf=_BEARTYPE)
                fault = None if bears else (name, value, hint)
        if fault is not None:
            return fault
    return None


def _paragraph(subject: str, fault: _Fault, arguments: Mapping[str, Any], bound_by: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # the public way to what is bound
        jaxtyping.print_bindings()
    bound = dict(re.findall(r"^(\w+)=(\d+|\(.*\))$", printed.getvalue(), re.MULTILINE))
    _, value, hint = fault
    text, dims = str(hint), [dim for array in _arrays(hint)[:1] for dim in array.dim_str.split()]
    names = [re.sub(r".*\.|\W", "", dim) for dim in dims]
    with contextlib.suppress(AttributeError, LookupError, ValueError):
        # {self.pixels} is looked up, never evaluated; what is more than a look-up stays as it is.
        text, dims = text.format(**arguments), [dim.format(**arguments) for dim in dims]
    # jaxtyping's way to write an annotation, made short: Float[784].
    text = re.sub(r"<class '(.*)'>", r"\1", text)
    text = re.sub(r"(?:[\w<>]+\.)+(?=\w)", "", text)
    text = re.sub(r"(\w+)\[(?:Array|ndarray), '([^']*)'\]", r"\1[\2]", text)
    # An array of either library; and one of several types of numbers.
    wanted = re.sub(r"Union\[([^\[\]]+(?:\[[^\]]*\])?(?:, .+)?)\]", _alternatives, text)
    used = dict.fromkeys(name for name in re.findall(r"\w+", wanted) if name in bound)
    where = ", ".join(f"{name} = {bound[name]}" for name in used)
    where = f" where {where} (bound by {bound_by})" if where else ""
    sizes = [int(n) if n.isdigit() else None for n in (bound.get(dim, dim) for dim in dims)]
    axes = list(zip(names, sizes, strict=True))
    mends = _mends(fault, axes, passed=bound_by == "earlier arguments")
    return " ".join([f"{subject} is {_came(value)}, wanted {wanted}{where}.", *mends])


def _alternatives(union: re.Match[str]) -> str:
    """Return the different members of a union: `UInt8[batch]`, or `UInt8[batch] | Int32[batch]`."""
    return " | ".join(dict.fromkeys(re.findall(r"[^,\[\]\s]+(?:\[[^\]]*\])?", union[1])))


def _came(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        library = "" if isinstance(value, jax.Array) else "numpy "
        return f"{library}{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        items = ", ".join([*map(_came, value[:4]), *["..."][: len(value) - 4]])
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    if isinstance(value, int | float | str):
        return f"{type(value).__name__} {value!r:.40}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__.replace("NoneType", "None")


def _arrays(hint: Any) -> list[Any]:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return [hint]
    return [array for part in typing.get_args(hint) for array in _arrays(part)]


def _mends(fault: _Fault, axes: _Axes, passed: bool) -> Iterator[str]:
    """What would most likely help, a sentence each."""
    name, value, hint = fault
    arrays, origin = _arrays(hint), typing.get_origin(hint)
    if origin is tuple and isinstance(value, list):
        yield f"A list came where a tuple is wanted: tuple({name})."
    if not arrays or origin not in (None, typing.Union, types.UnionType):
        return
    of_dtype = isinstance(value, arrays[0].dtype[Any, "..."])
    if arrays[0].dtype is jaxtyping.Key and not of_dtype:
        yield "jax.random.key(seed) makes a key: a seed or a legacy uint32 array is none."
    elif not isinstance(value, jax.Array | np.ndarray):
        yield f"An array is wanted: jnp.asarray({name})."
    else:
        if not isinstance(value, tuple(array.array_type for array in arrays)):
            library, module = ("JAX", "np") if isinstance(value, jax.Array) else ("NumPy", "jnp")
            yield f"A {library} array is not taken here: {module}.asarray({name})."
        rows = "label" in name and value.shape[-1:] > (1,) and _fits(value.shape[:-1], axes)
        if rows and (axes or jnp.issubdtype(value.dtype, jnp.floating)):
            yield f"Class indices are wanted, not one-hot rows: {name}.argmax(-1)."
            return
        if "*" not in arrays[0].dim_str and "..." not in arrays[0].dim_str:
            yield from _shape_mends(name, value.shape, axes, passed)
        if not of_dtype:
            yield _dtype_mend(name, value.dtype, arrays[0].dtype.__name__)


def _fits(shape: Sequence[int], axes: _Axes) -> bool:
    same = (size in (None, came) for came, (_, size) in zip(shape, axes, strict=False))
    return len(shape) == len(axes) and all(same)


def _shape_mends(name: str, shape: tuple[int, ...], axes: _Axes, passed: bool) -> Iterator[str]:
    def flat(sizes: Sequence[int]) -> list[int]:
        first = max(len(axes) - 1, 0)
        return [*sizes[:first], math.prod(sizes[first:])]

    if len(shape) == len(axes):
        for came, (axis, size) in zip(shape, axes, strict=True):
            if size not in (None, came):
                yield f"{axis or 'A size'} is {came} here, {size} there{_ADVICE.get(axis, '')}."
    elif passed and _fits((1, *shape), axes):
        yield f"One example was passed where a batch is wanted: {name}[None]."
    elif passed and _fits(shape[1:], axes):
        a, one = ("stack", "batch") if "batch" in dict(axes) else ("batch", "example")
        yield f"A {a} of {shape[0]} was passed where one {one} is wanted: use jax.vmap."
        if axes and axes[-1][1] is None:
            yield f"If it is one {one}, flatten it: {name}.reshape({str(flat(shape))[1:-1]})."
    elif _fits(flat(shape), axes):
        yield f"Flatten it: {name}.reshape({str(flat(shape))[1:-1]})."
    elif passed and _fits(flat(shape[1:]), axes):
        rows = str([shape[0], *flat(shape[1:])])[1:-1]
        yield f"A batch of {shape[0]}, not flat: use jax.vmap on {name}.reshape({rows})."


def _dtype_mend(name: str, came: Any, wanted: str) -> str:
    target = {"Float": "float32", "Integer": "int32"}.get(wanted, wanted.lower())
    if jnp.issubdtype(came, jax.dtypes.prng_key):
        return "A random key came: look at the order of the arguments."
    if target == "float32" and came == np.uint8:
        return f"Floats in [0, 1] are wanted, not raw pixels: {name}.astype(jnp.float32) / 255."
    if target == "uint8" and jnp.issubdtype(came, jnp.floating) and "label" not in name:
        return "Raw pixels are wanted, uint8 from 0 to 255: they are scaled later."
    return f"{came} came where {target} is wanted: {name}.astype(jnp.{target})."
