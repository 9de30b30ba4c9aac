"""Processes as TensorFlow names them: jobs, and the tasks of each job."""

from collections.abc import Mapping
from collections.abc import Sequence

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._common.errors import ClusterError

_ORDER = ("chief", "master", "worker")
"""The jobs whose tasks train, in the order of the processes."""

_REFUSED = {
    "ps": (
        "Parameter servers hold variables for asynchronous training, but "
        "here every process holds all of them. Start workers only."
    ),
    "evaluator": (
        "An evaluator reads checkpoints beside the training, and takes no "
        "part in it. Evaluate with `validation_data` in `fit`, or start the "
        "evaluator as a program of its own, without these settings."
    ),
}
"""Jobs of `tf.distribute` that there are not here, and why."""


def cluster_of_jobs(
    jobs: Mapping[str, Sequence[str]],
    task_type: str | None,
    task_index: int | None,
    source: str,
) -> Cluster:
    """Returns the processes of TensorFlow's jobs, the chief's first.

    Args:
        jobs: The addresses of the tasks of each job.
        task_type: The job of this process.
        task_index: Which task of its job this process is.
        source: Where this was found, for the result and messages.

    Returns:
        The tasks of `chief` (or `master`, its older name), then of `worker`.

    Raises:
        ClusterError: If there are other jobs, there is a chief and a master,
            or this process is none of the tasks.
    """
    _refuse_others([*jobs, *filter(None, [task_type])], source)
    if jobs.get("chief") and jobs.get("master"):
        raise ClusterError(
            f"{source}: expected one chief. Got the job 'chief' and the job "
            "'master', which is an older name of it."
        )
    own = list(jobs.get(task_type or "", ()))
    if task_index is None or not 0 <= task_index < len(own):
        counts = {name: len(tasks) for name, tasks in jobs.items()}
        raise ClusterError(
            f"{source}: expected the type and the index of one of these "
            f"tasks: {counts}. Got the type {task_type!r} and the index "
            f"{task_index!r}."
        )
    before = [*_ORDER[: _ORDER.index(task_type or "")]]
    first = sum(len(jobs.get(name, ())) for name in before)
    addresses = [each for name in _ORDER for each in jobs.get(name, ())]
    return Cluster(tuple(addresses), first + task_index, source)


def _refuse_others(names: Sequence[str], source: str) -> None:
    for name in names:
        if name not in _ORDER:
            reason = _REFUSED.get(name, f"Expected only {', '.join(_ORDER)}.")
            raise ClusterError(f"{source} has the job {name!r}. {reason}")
