"""What Keras' loops take for the end of the data, and what they should not.

They take every `tf.errors.OutOfRangeError` for it, and end without a word.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._compat import error_texts


class EndOfData(tf.errors.OutOfRangeError):
    """The data of an epoch have come to their end."""

    def __init__(self) -> None:
        super().__init__(None, None, "End of the data.")


@contextlib.contextmanager
def not_the_end(what: str, *, of_a_step: bool = False) -> Iterator[None]:
    """Raises another error for one that is not the end of the data.

    Args:
        what: What is done in it, for the message.
        of_a_step: Whether a step runs in it, which may draw from an iterator
            of its own. As on one device, training ends with that.

    Raises:
        tf.errors.InternalError: In place of an `OutOfRangeError` that is none.
    """
    try:
        yield
    except EndOfData:
        raise
    except tf.errors.OutOfRangeError as error:
        if of_a_step and error_texts.is_end_of_iterator(error):
            raise
        raise tf.errors.InternalError(
            None, None, f"{what} has failed: {error_texts.reason_of(error)}"
        ) from error
