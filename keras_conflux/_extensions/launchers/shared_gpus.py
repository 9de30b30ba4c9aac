"""The processes of a host divide the GPUs that all of them see."""

import contextlib

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_part(local_rank: int, count: int) -> None:
    """Lets this process see its part of the GPUs of its host.

    Where it sees fewer GPUs than there are processes, somebody has dealt them
    out already, and it takes all.

    Args:
        local_rank: The position of this process among the host's.
        count: The number of processes of the host.
    """
    if count == 1:
        return
    import tensorflow as tf  # `keras-conflux run` does without it

    seen = tf.config.get_visible_devices("GPU")
    share = len(seen) // count
    if share > 0:
        # If TensorFlow has started, joining the others says so.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices(
                seen[local_rank * share : (local_rank + 1) * share], "GPU"
            )
