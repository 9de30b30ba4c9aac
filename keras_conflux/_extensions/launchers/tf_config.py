"""Processes that are told in `TF_CONFIG`.

It is the variable of `tf.distribute`, and set by `keras-conflux run`, by TFJobs
on Kubernetes, and on Vertex AI. TensorFlow describes it at
https://www.tensorflow.org/guide/distributed_training.
"""

import json
from collections.abc import Mapping
from typing import Any

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError

_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
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


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns the announcement in `TF_CONFIG`, if it names processes."""
    text = environ.get("TF_CONFIG", "").strip()
    try:
        jobs, task_type, task_index = _parsed(text)
    except (AttributeError, TypeError, ValueError) as error:
        raise ClusterError(
            "Expected the environment variable TF_CONFIG to be JSON such as "
            f"{_EXAMPLE}. Got {text!r}: {error}."
        ) from error
    if "sparseCluster" in text:
        raise ClusterError(
            "TF_CONFIG has a 'sparseCluster', in which a process knows only "
            "some of the others, but each must reach all. In a TFJob, leave "
            "out `enableDynamicWorker`."
        )
    if not any(jobs.values()):
        return None
    cluster = _cluster(jobs, task_type, task_index)
    count = len(cluster.addresses)
    return Announcement("TF_CONFIG", "TF_CONFIG", count, lambda _: cluster)


def _parsed(text: str) -> tuple[dict[str, list[str]], Any, int | None]:
    """Returns the addresses of jobs, and the type and index of this task."""
    config = json.loads(text or "{}")
    jobs, task = config.get("cluster") or {}, config.get("task") or {}
    for job, tasks in jobs.items():
        if not isinstance(tasks, list) or {*map(type, tasks)} - {str}:
            raise TypeError(f"{tasks!r} are no addresses of {job!r}")
    index = task.get("index")  # some launchers write it as text
    return jobs, task.get("type"), None if index is None else int(index)


def _cluster(
    jobs: dict[str, list[str]], task_type: Any, task_index: int | None
) -> Cluster:
    """Returns the tasks of `chief` or `master`, then of `worker`."""
    for name in [*jobs, *filter(None, [task_type])]:
        if name not in _ORDER:
            reason = _REFUSED.get(name, f"Expected only {', '.join(_ORDER)}.")
            raise ClusterError(f"TF_CONFIG has the job {name!r}. {reason}")
    if jobs.get("chief") and jobs.get("master"):
        raise ClusterError(
            "TF_CONFIG: expected one chief. Got the job 'chief' and the job "
            "'master', which is an older name of it."
        )
    own = jobs.get(task_type or "", [])
    if task_index is None or not 0 <= task_index < len(own):
        there = [f"{name} 0 to {len(each) - 1}" for name, each in jobs.items()]
        raise ClusterError(
            "TF_CONFIG: expected the type and the index of one of these "
            f"tasks: {', '.join(there)}. Got the type {task_type!r} and the "
            f"index {task_index!r}."
        )
    before = _ORDER[: _ORDER.index(task_type)]
    first = sum(len(jobs.get(name, ())) for name in before)
    addresses = [each for name in _ORDER for each in jobs.get(name, ())]
    return Cluster(tuple(addresses), first + task_index, "TF_CONFIG")
