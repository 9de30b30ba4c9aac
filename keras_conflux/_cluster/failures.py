"""Reports an error of one process to all others."""

import contextlib
import re
import time
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.contexts import Setting
from keras_conflux._common.errors import ConfluxError
from keras_conflux._common.errors import ProcessError
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_processes

_LENGTH = 1000
_PERIOD = 1.0
"""Seconds between two looks whether all processes still live."""
_REPORTED = "has raised"
_NOISE = re.compile(
    r" *(\[type\.googleapis|The error could be from|Additional GRPC error)"
)
_inside = Setting(False)


class ExitOfAllProcesses(SystemExit):
    """Ends this process at a place where all other processes end as well."""


def of_all_processes(error: ConfluxError) -> ConfluxError:
    """Returns an error that all processes raise and may catch."""
    error.conflux_is_of_all = True
    return error


@contextlib.contextmanager
def errors_reported_to_all(what: str) -> Iterator[None]:
    """Reports an error of this process to all others, which end with it."""
    if process_count() == 1 or _inside.get():
        yield
        return
    try:
        with _inside.to(True):
            yield
    except ExitOfAllProcesses:
        raise
    except BaseException as error:
        if getattr(error, "conflux_is_of_all", False):
            raise
        if is_caused_by_another_process(error):
            raise ProcessError(_failure_of_another(what, error)) from None
        is_op = isinstance(error, tf.errors.OpError)
        reason = error_texts.reason_of(error) if is_op else str(error)
        text = (
            f"process {process_index()} {_REPORTED} {type(error).__name__} in "
            f"{what}: {reason}"
        )
        with contextlib.suppress(tf.errors.OpError):  # another was first
            tensorflow_processes.report_error(text[:_LENGTH])
        raise


def wait_while_all_processes_live(call: DaemonCall, seconds: float) -> bool:
    """Waits for a call in which processes wait; returns whether it has ended.

    Raises TensorFlow's error if a process has failed, which ends collectives,
    but not a program of XLA in which a GPU waits for another.
    """
    if process_count() == 1:
        return call.wait(seconds)
    end = time.monotonic() + seconds
    while not call.wait(min(_PERIOD, max(0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
        error = tensorflow_processes.failure_of_any(process_count())
        if error is not None and not call.wait(_PERIOD):
            call.abandon()
            raise error
    return True


def is_caused_by_another_process(error: BaseException) -> bool:
    """Whether an error says that another process has failed or has ended."""
    broken = (
        *(tf.errors.UnavailableError, tf.errors.InternalError),
        *(tf.errors.AbortedError, tf.errors.CancelledError),
        *(tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError),
    )
    words = r"/job:worker|[Ss]ocket closed|heartbeat|[Cc]ollective ops is abort"
    return isinstance(error, broken) and bool(re.search(words, str(error)))


def _failure_of_another(what: str, error: BaseException) -> str:
    """Returns the message of an error that another process has caused."""
    text = " ".join(str(getattr(error, "message", error)).split())
    ended = f"{what} has ended in process {process_index()}, because"
    reported = re.search(rf"process \d+ {_REPORTED} .*", text)
    if reported:
        return f"{ended} {_NOISE.split(reported[0])[0].rstrip(': ')}"
    named = set(re.findall(r"/task:(\d+)", text)) - {str(process_index())}
    if not named and process_index() > 0 and "CoordinationService" in text:
        named = {"0"}  # which runs the service
    who = f"process {', '.join(sorted(named))}" if named else "another process"
    _, _, cause = text.rpartition("Collective ops is aborted by: ")
    return (
        f"{ended} {who} cannot be reached: it has ended, perhaps without "
        "making this call, which all have to make, or its host or the "
        f"network has failed. TensorFlow says: {_NOISE.split(cause)[0][-500:]}"
    )
