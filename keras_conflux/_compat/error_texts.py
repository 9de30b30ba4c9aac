"""Reads error messages of Keras 3.15.1 and TensorFlow 2.21.0.

Some kinds of failure are told apart by their messages only.
"""

import re
from typing import Any

import tensorflow as tf

from keras_conflux._common import errors

_NOISE = re.compile(
    r"Graph execution error|Detected at node|File |\d+ root error|"
    r"Stack trace for|<stack traces|The op is created|tf2xla |$"
)


def cannot_compile(reason: str) -> tf.errors.UnimplementedError:
    """Returns an error that is one of the compiler, as below."""
    return tf.errors.UnimplementedError(None, None, reason)


def is_of_compiler(error: tf.errors.OpError) -> bool:
    """Whether XLA says that it cannot compile a program."""
    kinds = tf.errors.InvalidArgumentError | tf.errors.UnimplementedError
    text = str(error)
    if isinstance(error, tf.errors.InternalError):
        # So XLA says where one of its passes has made a program that is wrong.
        return "RET_CHECK failure (external/xla/xla/service/" in text
    return isinstance(error, kinds) and ("XLA" in text or "compil" in text)


def is_of_operations(error: tf.errors.OpError) -> bool:
    """Whether XLA says that it has not got an operation of a program."""
    return "Detected unsupported operations" in str(error)


def is_of_a_full_device(error: BaseException) -> bool:
    """Whether XLA says that a program which begins to run gets no memory."""
    is_of_memory = isinstance(error, tf.errors.ResourceExhaustedError)
    return is_of_memory and "while trying to allocate" in str(error)


def is_end_of_iterator(error: tf.errors.OpError) -> bool:
    """Whether an operation has drawn from an iterator at its end."""
    text = str(error)
    return "End of sequence" in text and "IteratorGetNext" in text


def is_of_deleted_variables(error: AssertionError) -> bool:
    """Whether a traced function reads variables that are there no more."""
    return "referencing variables which have been deleted" in str(error)


def reason_of(error: tf.errors.OpError) -> str:
    """Returns a message without the place where the op was made."""
    lines = [
        re.sub(r"^\(\d\) \w+: +|{{.*?}}|\[\[.*?\]\]", "", line.strip()).strip()
        for line in str(error.message).splitlines()
    ]
    telling = [line for line in lines if not _NOISE.match(line)]
    return " ".join(dict.fromkeys(telling))[:500]


def is_of_sizes(error: Exception) -> bool:
    """Whether an error of a step may come from the number of its samples."""
    kinds = tf.errors.InvalidArgumentError | TypeError | ValueError
    if not isinstance(error, kinds) or "Unknown variable" in str(error):
        return False
    words = (
        r"(?i)\b(shapes?|dimensions?|sizes?|elements|bounds|index|indices|"
        r"values|NoneType|assertion)\b"
    )
    return re.search(words, str(error)) is not None


def is_of_length(error: BaseException) -> bool:
    """Whether a program may have taken a length, or `None`, for a number."""
    texts = r"NoneType|None values|elements of .*None|same dtype.*int32|"
    texts += r"has type (int32|float64) that does not match type float"
    words = re.search(texts, str(error))
    return isinstance(error, TypeError | ValueError) and words is not None


def replica_of(error: tf.errors.OpError) -> int:
    """Returns the index of the replica whose op failed."""
    # TensorFlow puts the ops of replicas after the first in a scope.
    match = re.search(r"\breplica_(\d+)/", str(error))
    return int(match[1]) if match else 0


_NOTES = {
    "has no attribute 'numpy'": (
        "A step is traced once, before its tensors have values. Return them, "
        "or print them with `tf.print`."
    ),
    "len is not well defined for a symbolic Tensor": (
        "`len` of a tensor needs AutoGraph, which converts no `train_step`, "
        "and no function without a source that it can read, as one typed at a "
        "prompt. Put that in a file, or write `tf.shape(x)[0]`."
    ),
}


@errors.add_notes_by
def explain(error: BaseException, *_: Any) -> None:
    """Says what else to write in a step that is traced."""
    for text, note in _NOTES.items():
        if text in str(error):
            error.add_note(note)


def is_untraceable_by_shapes(error: Exception) -> bool:
    """Whether Keras cannot build a model from shapes alone.

    It says so, or asks for a value that a metric has set in a branch.
    """
    texts = "automatically build the model", "is out of scope and cannot be"
    return any(text in str(error) for text in texts)
