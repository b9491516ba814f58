"""A model as one file that is run without this package and without Equinox.

The file is StableHLO in the format of `jax.export`, the parameters in it: it needs JAX (and its
reader `flatbuffers`) alone. Source: docs.jax.dev, "Exporting and serializing staged-out
computations".
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.export import Exported
from jaxtyping import Array, Float32

from mlp_research.data.inputs import Inputs
from mlp_research.errors import Failure
from mlp_research.models import Model
from mlp_research.shapes import Images

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "tpu")
MODEL_FILE = "model.jaxexport"

LogitsFunction = Callable[[Images], Float32[Array, "batch classes"]]


class ExportError(Failure):
    """A model that cannot be exported: why, and what to do."""


def logits_function(model: Model, inputs: Inputs) -> LogitsFunction:
    """Return the model as a function of raw images alone: randomness off, all else constant."""
    evaluated = eqx.nn.inference_mode(model)

    def logits(images: Images) -> Float32[Array, "batch classes"]:
        return jax.vmap(lambda image: evaluated(image))(inputs(images)).astype(jnp.float32)

    return logits


def export(
    model: Model,
    images: Images,
    inputs: Inputs,
    platforms: Sequence[Platform] = PLATFORMS,
) -> Exported:
    """Return one program for any batch size, from raw images to float32 logits.

    `images` says by an example or two how many features there are, and whether they are pixels of
    0 to 255 (uint8) or floats. The logits are bitwise those of
    `jax.jit(logits_function(model, inputs))` at the same batch size. A program that takes the
    parameters as arguments may be compiled to another order of the same sums. Raises `ExportError`
    for a model with an operation that a platform lacks.
    """
    (batch,) = jax.export.symbolic_shape("batch")
    features = jax.ShapeDtypeStruct((batch, images.shape[1]), images.dtype)
    program = jax.jit(logits_function(model, inputs))
    try:
        return jax.export.export(program, platforms=platforms)(features)
    except NotImplementedError as error:
        raise ExportError(
            f"the model cannot be exported for {', '.join(platforms)}: {_first_line(error)}. "
            "Name by --platforms only those that have all its operations"
        ) from None


def serialize(exported: Exported) -> bytes:
    """What the file holds. Raises `ExportError` where flatbuffers is missing."""
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ExportError(
            f"an export is written by the package flatbuffers, which cannot be imported ({error}): "
            "pip install flatbuffers"
        ) from None
    except (NotImplementedError, ValueError) as error:
        raise ExportError(f"the model cannot be written to a file: {_first_line(error)}") from None


def deserialize(content: bytes) -> LogitsFunction:
    """The compiled function of a file's content, as the loader makes it."""
    return jax.jit(jax.export.deserialize(bytearray(content)).call)


def loader(content: bytes, images: Images, classes: int) -> str:
    """Return the text of a Python file that stands beside the model's file and loads it.

    `images` are as for `export`.
    """
    return LOADER.format(
        file=MODEL_FILE,
        checksum=hashlib.sha256(content).hexdigest(),
        features=described(images),
        classes=classes,
    )


def described(images: Images) -> str:
    """Return what the program takes: `uint8 [batch, 784], 0 to 255`."""
    bounds = ", 0 to 255" if images.dtype == np.uint8 else ""
    return f"{images.dtype} [batch, {images.shape[1]}]{bounds}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


# JAX notices a file that was cut, but not a changed byte among the parameters: hence the checksum.
LOADER = '''\
"""Logits of an exported model. This needs jax and flatbuffers: pip install jax flatbuffers.

    python load.py IMAGES.npy        prints the predicted class of each image

    from load import load            in Python
    logits = load()(images)
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
from jax import export, jit

MODEL = Path(__file__).with_name("{file}")
SHA256 = "{checksum}"


def load(path=MODEL):
    """A compiled function from images to logits, for any batch size.

    Images are {features}, each flat, row by row; logits are
    float32 [batch, {classes}]. A new batch size is compiled when it is first seen.
    """
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{{path}} is damaged, or not the model that this file was written for")
    return jit(export.deserialize(bytearray(content)).call)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*np.asarray(load()(np.load(sys.argv[1]))).argmax(axis=1), sep="\\n")
'''
