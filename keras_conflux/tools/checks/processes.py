"""Whether processes find each other. `keras-conflux run` starts this in all."""

import argparse

from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong
from keras_conflux.tools.checks.table import doing

_SECONDS = 60


def check(options: argparse.Namespace) -> Passed:
    """Joins the others, and adds up a number of each."""
    import tensorflow as tf

    import keras_conflux as kc

    doing("the meeting of all processes")
    kc.devices(1)
    try:
        kc.initialize(timeout=_SECONDS)
    except (kc.ClusterError, kc.ProcessError) as error:
        raise Wrong(str(error), "look for the cause in the message") from None
    count = kc.process_count()
    doing(f"an all-reduce over {count} processes")
    devices = len(kc.replicate().devices)
    # An argument, as a constant would make another program in each process.
    given = tf.constant(kc.process_index() + 1)
    reduce = kc.withdevices(lambda number: kc.allreduce("sum", number))
    found, expected = int(reduce(given)[0]), devices * count * (count + 1) // 2
    if found != expected:
        raise Wrong(
            f"a sum over {count} processes is {found}, and should be "
            f"{expected}",
            "`keras-conflux env`, and report both",
        )
    kc.barrier(_SECONDS)
    return Passed(f"{count} processes meet, and add up right")
