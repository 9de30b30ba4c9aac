"""Warnings that point at the user's line."""

import pathlib
import sysconfig
import traceback
import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import ConfluxWarning

_LIBRARIES = tuple(
    str(pathlib.Path(file).parent)
    for file in (pathlib.Path(__file__).parent, keras.__file__, tf.__file__)
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_SITE_PACKAGES = sysconfig.get_path("purelib")
_registry: dict[Any, Any] = {}


def warn(message: str, operation: tf.Operation | None = None) -> None:
    """Warns, once for each line, with the user's own innermost line."""
    place = users_line(operation)
    warnings.warn_explicit(message, ConfluxWarning, *place, registry=_registry)


def users_line(operation: tf.Operation | None = None) -> tuple[str, int]:
    """Returns the user's line that has led here, or has made an operation."""
    # The traceback of an op has the user's lines where AutoGraph has
    # translated them; Python's own stack has lines of generated files.
    if operation is not None:
        frames = operation.traceback
    elif tf.executing_eagerly():
        frames = traceback.extract_stack()
    else:
        frames = tf.no_op().traceback
    theirs = (x for x in reversed(frames) if _is_the_users(x.filename))
    frame = next(theirs, frames[0])
    return frame.filename, frame.lineno or 0


def is_of_package(operation: tf.Operation) -> bool:
    """Whether this package has made an operation, or nobody knows who has."""
    package, _, tensorflow = _LIBRARIES
    for frame in reversed(operation.traceback or ()):
        if not frame.filename.startswith(tensorflow):
            return frame.filename.startswith(package)
    return True


def _is_the_users(file: str) -> bool:
    if file.startswith(_SITE_PACKAGES):  # lies in the standard library's folder
        return not file.startswith(_LIBRARIES)
    return not file.startswith((_STANDARD_LIBRARY, "<frozen ", *_LIBRARIES))
