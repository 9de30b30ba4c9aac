"""`barrier`: waits until all processes have come to the same place."""

from keras_conflux._cluster.agreement import agree
from keras_conflux._cluster.failures import told_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._common.waiting import DEFAULT_STEP_TIMEOUT


def barrier(timeout: float = DEFAULT_STEP_TIMEOUT) -> None:
    """Waits until all processes have come here.

    All processes call it equally often. Alone, it returns at once.

    Args:
        timeout: How many seconds the others are waited for.

    Raises:
        ProcessError: If one does not come in time, has ended or has failed.
        ReplicaMismatchError: If one is about to do something else with the
            others, such as `fit`.

    Example:
        ```python
        if kc.process_index() == 0:
            np.save("prepared.npy", x)
        kc.barrier()
        prepared = np.load("prepared.npy")
        ```
    """
    if process_count() == 1:
        return
    # A barrier of TensorFlow's coordination service would wait for ever where
    # the network is cut. A collective ends when heartbeats do.
    with told_to_all("a barrier"):
        agree("a barrier", seconds=timeout)
