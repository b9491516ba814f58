"""The base of every config: immutable, validated, its faults said in sentences."""

import json
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from mlp_research.errors import ConfigError

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class BaseConfig(
    pydantic.BaseModel, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
):
    """A frozen pydantic model whose faults read as sentences.

    Raises `ConfigError` with one line for each field at fault.
    """

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError("\n".join(_sentence(fault) for fault in error.errors())) from None


def _in_float32(value: float) -> float:
    """Return a number that does not become zero or infinity in float32, in which a step computes.

    Raises what pydantic says of a number that is too small or too large.
    """
    if 0 < value < SMALLEST:
        raise PydanticKnownError("greater_than_equal", {"ge": SMALLEST})
    if value > LARGEST:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST})
    return value


PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]


NonNegativeFloat = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]


Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A number from 0 to below 1, as a decay rate or a probability."""


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text that anyone may have written. Raises `ConfigError` if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise ConfigError("not JSON that can be read: it is nested too deep") from None
    except ValueError as error:  # another encoding, or a number of thousands of digits
        raise ConfigError(f"not JSON that can be read: {error}") from None


def _sentence(fault: Any) -> str:
    field = ".".join(str(part) for part in fault["loc"])
    context = fault.get("ctx", {})
    if isinstance(context.get("error"), ConfigError):
        return "\n".join(
            f"{field}.{line}" if field else line for line in str(context["error"]).splitlines()
        )
    value = fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            return f"{field} is not a setting: remove it or correct its name"
        case "missing":
            return f"{field} is missing: give it a value"
        case "finite_number":
            return f"{field} is {value}: it must be a finite number"
        case "greater_than":
            return f"{field} is {value}: it must be > {context['gt']}"
        case "greater_than_equal":
            return f"{field} is {value}: it must be >= {context['ge']}"
        case "less_than":
            return f"{field} is {value}: it must be < {context['lt']}"
        case "less_than_equal":
            return f"{field} is {value}: it must be <= {context['le']}"
        case "literal_error":
            return f"{field} is {value!r}: it must be one of {context['expected']}"
        case "value_error":
            return f"{field}: {context['error']}" if field else str(context["error"])
        case _:
            message = fault["msg"][0].lower() + fault["msg"][1:]
            return f"{field} is {value!r}: {message}"
