"""Keeps back lines of TensorFlow's log that are not true of replicas."""

import contextlib
import contextvars
import logging
from collections.abc import Iterator

import tensorflow as tf

_UNTRUE = (
    # Each process has a strategy of its own devices; all devices meet in
    # collectives.
    "Using MirroredStrategy with devices",
    "Initializing local devices since in-graph multi-worker training",
    # Of reductions that are asked for outside of replicas. Replicas meet in
    # collectives.
    "Reduce to ",
    "Gather to ",
)

_is_ours: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "code_of_ours_runs", default=False
)


def _is_true(record: logging.LogRecord) -> bool:
    return not (_is_ours.get() and record.getMessage().startswith(_UNTRUE))


@contextlib.contextmanager
def without_untrue_lines() -> Iterator[None]:
    """Keeps these lines back while something of ours runs in this thread."""
    tf.get_logger().addFilter(_is_true)  # once, however often it is called
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)
