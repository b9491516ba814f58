"""Parts: the frozen configs that an experiment is made of, the package's and yours alike.

A direct subclass of `Part` is a family: models, objectives, optimizers, schedules. A concrete class
below it is one of its kinds as soon as it is defined, known by the default of its field `kind`.
A part is also a pytree: its traced numbers are leaves, all else is static. Inside a compiled
program a part is seen with traced scalars in place, so that its code just says `self.alpha`.
"""

import abc
import contextlib
import dataclasses
import functools
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import pydantic
from jax.tree_util import GetAttrKey
from pydantic_core import core_schema

from mlp_research.base_config import BaseConfig
from mlp_research.errors import ConfigError

PACKAGE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Traced:
    """Marks a float field as a traced number: one compiled program serves all its values.

    Write `alpha: Annotated[PositiveFloat, TRACED] = 0.2`.
    """

    none: float | None = None
    """The number that stands for None, where the field may be None."""


TRACED = Traced()


def is_family(cls: type) -> bool:
    """Return whether a class is the base of a family: a direct subclass of `Part`."""
    return "kinds" in vars(cls)


class Part(BaseConfig, abc.ABC, frozen=True):
    """One part of an experiment. `kind` is its name on the command line and in config.json."""

    kind: str
    kinds: ClassVar[dict[str, type["Part"]]]
    """The kinds of a family, by name."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Part in cls.__bases__:
            cls.kinds = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        jax.tree_util.register_pytree_with_keys(cls, _children, cls._rebuilt)
        if not (is_family(cls) or inspect.isabstract(cls) or cls.__module__ == __name__):
            _make_known(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A field of a family's type holds any of its kinds, chosen by `kind`."""
        if not is_family(cls):
            return handler(source)
        serialization = core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True)
        return core_schema.no_info_plain_validator_function(cls.chosen, serialization=serialization)

    @classmethod
    def chosen(cls, value: Any) -> Self:
        """Return the part that a value describes: a part, a kind, or a mapping with a kind.

        Raises `ConfigError` for a kind that the family does not have.
        """
        if isinstance(value, cls):
            return value
        values = {"kind": value} if isinstance(value, str) else value
        if not isinstance(values, dict) or "kind" not in values:
            raise ConfigError(f"kind is missing: it must be one of {', '.join(cls.kinds)}")
        return cls.kind_named(values["kind"])(**values)

    @classmethod
    def kind_named(cls, kind: Any) -> type[Self]:
        """Return the class of a kind. Raises `ConfigError` where the family has none such."""
        found: Any = cls.kinds.get(kind) if isinstance(kind, str) else None
        if found is None:
            raise ConfigError(
                f"kind is {kind!r}: it must be one of {', '.join(cls.kinds)}, or bring the file "
                "that defines it by --with FILE"
            )
        return found

    @classmethod
    def known_or_absent(cls, value: Any) -> Any:
        """Return the value, or a part that can do nothing where its kind is not known here."""
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in cls.kinds:
            return value

        def missing(self: Part, *arguments: Any, **named: Any) -> Any:
            raise ConfigError(
                f"kind is {self.kind!r}: bring the file that defines it by --with FILE"
            )

        # A class of this module is no kind, so that no other part finds it.
        hooks: dict[str, Any] = dict.fromkeys(cls.__abstractmethods__, missing)
        body = hooks | {"__module__": __name__, "__annotations__": {"kind": str}}
        absent = type(cls)(f"Absent{cls.__name__}", (cls,), body, frozen=True, extra="allow")
        return absent(**value)

    @classmethod
    def _rebuilt(cls, untraced: "Part", children: Any) -> Self:
        """Return the part with other children. Nothing is validated: they may be tracers."""
        return cls.model_construct(
            **untraced.__dict__ | dict(zip(_names(cls), children, strict=True))
        )

    @property
    def location(self) -> str:
        """The place of the class's definition: `my_lab.py:12`, or the name of its module."""
        return location(type(self))

    def traced(self) -> Self:
        """Return the part with float32 scalars as its traced numbers, as a program takes it."""
        values = {}
        for name, marker in _traced_fields(type(self)).items():
            value = getattr(self, name)
            number = marker.none if value is None else value
            values[name] = None if number is None else jnp.float32(number)
        inner = {name: getattr(self, name).traced() for name in _inner_parts(type(self))}
        return type(self).model_construct(**self.__dict__ | values | inner)

    def __init__(self, /, **values: Any):
        super().__init__(**values)
        try:
            hash(_untraced(self))
        except TypeError:
            wrong = [name for name, value in self if not _is_hashable(value)]
            raise ConfigError(
                f"{', '.join(wrong)} cannot be compared with another program's: use a tuple in "
                "place of a list, a set or a mapping"
            ) from None


def location(cls: type) -> str:
    """Return where a class is defined: `my_lab.py:12`, or its module where there is no file."""
    try:
        line = inspect.getsourcelines(cls)[1]
        return f"{Path(inspect.getsourcefile(cls) or '').name}:{line}"
    except (OSError, TypeError):
        return cls.__module__


def files_of(parts: list[Part]) -> list[Path]:
    """Return the files outside the package that define these parts, bases included."""
    files = [_file_from_outside(base) for part in parts for base in type(part).__mro__]
    return sorted({file for file in files if file is not None})


@contextlib.contextmanager
def blaming(parts: list[Part]) -> Iterator[None]:
    """Turn what a part from outside the package raises into one message with its file and line.

    Raises `ConfigError` in its place. What the package's own code raises passes as it is.
    """
    try:
        yield
    except Exception as error:
        files = {str(file) for file in files_of(parts)}
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
        if not frames or isinstance(error, ConfigError):
            raise
        frame = frames[-1]
        kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}: {kind}"
            f"{' '.join(str(error).split())[:1000]}"
        ) from error


def _make_known(cls: type[Part]) -> None:
    """Add a class to its family's kinds. A later definition of one class replaces the earlier."""
    family = next(base for base in cls.__mro__ if is_family(base))
    kind = cls.model_fields["kind"].default
    if not isinstance(kind, str):
        raise ConfigError(f"{cls.__qualname__} has no kind: add `kind: Literal[...] = ...`")
    known = family.kinds.get(kind)
    if known is not None and _identity(known) != _identity(cls):
        raise ConfigError(
            f"{cls.__qualname__} has the kind {kind!r} of {known.__qualname__} "
            f"({location(known)}): give it a `kind` of its own"
        )
    family.kinds[kind] = cls


def _identity(cls: type) -> tuple[str, str]:
    """Return what stays the same when a file is run again, or a notebook's cell."""
    try:
        return inspect.getsourcefile(cls) or cls.__module__, cls.__qualname__
    except (OSError, TypeError):
        return cls.__module__, cls.__qualname__


@functools.cache
def _traced_fields(cls: type[Part]) -> dict[str, Traced]:
    """Return the traced fields of a class with their marks."""
    marked = {
        name: next((mark for mark in field.metadata if isinstance(mark, Traced)), None)
        for name, field in cls.model_fields.items()
    }
    return {name: mark for name, mark in marked.items() if mark is not None}


@functools.cache
def _inner_parts(cls: type[Part]) -> tuple[str, ...]:
    """Return the fields of a class that hold a part."""
    return tuple(
        name
        for name, field in cls.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
    )


def _names(cls: type[Part]) -> tuple[str, ...]:
    """Return the fields that are children of the part as a pytree."""
    return (*_traced_fields(cls), *_inner_parts(cls))


def _children(part: Part) -> tuple[list[tuple[Any, Any]], Part]:
    """Return (children with their keys, the part without them), as JAX asks for them."""
    children = [(GetAttrKey(name), getattr(part, name)) for name in _names(type(part))]
    return children, _untraced(part)


def _untraced(part: Part) -> Part:
    """Return the static remainder of a part: equal where one program serves both."""
    return type(part).model_construct(**part.__dict__ | dict.fromkeys(_names(type(part))))


def _dumped(part: Part, info: pydantic.SerializationInfo) -> dict[str, Any]:
    return part.model_dump(mode=info.mode)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _file_from_outside(cls: type) -> Path | None:
    """Return the file that defines a class below `Part`, if it is not the package's."""
    if not issubclass(cls, Part) or is_family(cls) or cls is Part:
        return None
    try:
        source = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return None
    if source is None or Path(source).is_relative_to(PACKAGE):
        return None
    return Path(source)
