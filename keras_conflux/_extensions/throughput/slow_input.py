"""Tells, once, that `fit` has waited for its data and not for the devices."""

import logging

from keras_conflux._fit.input.measurements import Measurements

MINIMUM_SECONDS = 10.0
"""How long the wait has to be: the first batches of epochs are waited for."""
MINIMUM_SHARE = 0.2
"""How large a part of the time."""

_log = logging.getLogger("keras_conflux")
_has_told = False


def tell(name: str, measured: Measurements) -> None:
    """Logs a warning if the data of a call of `fit` has limited its speed."""
    global _has_told
    waited = measured.waited_in_call
    total = waited + measured.busy_in_call
    is_short = waited < MINIMUM_SECONDS
    if _has_told or is_short or waited < MINIMUM_SHARE * total:
        return
    _has_told = True
    _log.warning(
        "%s: `fit` has waited for its data for %.0f of %.0f s. With a "
        "tf.data.Dataset, give `num_parallel_calls=tf.data.AUTOTUNE` to `map`, "
        "call `cache()` where the data fit into memory, and "
        "`prefetch(tf.data.AUTOTUNE)` last. With a keras.utils.PyDataset, set "
        "`workers` and `use_multiprocessing`. The callback "
        "keras_conflux.Throughput shows the wait of each epoch as "
        "`input_wait`.",
        name,
        waited,
        total,
    )
