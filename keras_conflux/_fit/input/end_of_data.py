"""What Keras' loops take for the end of the data, and what they should not."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._compat import error_texts


@contextlib.contextmanager
def not_the_end(what: str) -> Iterator[None]:
    """Raises another error for one that Keras' loops would not raise.

    They take every `tf.errors.OutOfRangeError` for the end of the data, and
    training would end there without a word.

    Args:
        what: What is done in it, for the message.

    Raises:
        tf.errors.InternalError: In place of such an error, unless it comes from
            an iterator that a step draws from itself.
    """
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        if error_texts.is_end_of_iterator(error):
            raise
        raise tf.errors.InternalError(
            None, None, f"{what} has failed: {error_texts.reason_of(error)}"
        ) from error
