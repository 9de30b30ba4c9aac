"""What Keras keeps private of its callbacks."""

import keras


def tensorboard_needs_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard callback writes or profiles single batches."""
    # `profile_batch` is kept as the first batch to profile.
    return callback.update_freq != "epoch" or callback._start_batch > 0
