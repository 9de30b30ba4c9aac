"""Processes that are told in `TF_CONFIG`.

It is the variable of `tf.distribute`, and set by `keras-conflux run`, by TFJobs
on Kubernetes, and on Vertex AI. TensorFlow describes it at
https://www.tensorflow.org/guide/distributed_training.
"""

import json
from collections.abc import Mapping
from typing import Any

from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.jobs import cluster_of_jobs

_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns what `TF_CONFIG` tells.

    Args:
        environ: The environment variables.

    Returns:
        An announcement, or `None` if `TF_CONFIG` is not set or names no
        processes, as in a job of one.

    Raises:
        ClusterError: If it is no JSON of the expected form, or has tasks that
            cannot take part.
    """
    config = _parsed(environ.get("TF_CONFIG", ""))
    if "sparseCluster" in config:
        raise ClusterError(
            "TF_CONFIG has a 'sparseCluster', in which a process knows only "
            "some of the others, but each must reach all. In a TFJob, leave "
            "out `enableDynamicWorker`."
        )
    jobs = _dict(config, "cluster")
    if not any(jobs.values()):
        return None
    task = _dict(config, "task")
    cluster = cluster_of_jobs(
        {name: _addresses(name, tasks) for name, tasks in jobs.items()},
        task.get("type"),
        _index(task.get("index")),
        "TF_CONFIG",
    )
    return Announcement(
        source="TF_CONFIG",
        count_from="TF_CONFIG",
        count=len(cluster.addresses),
        find=lambda: cluster,
    )


def _parsed(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise _malformed(f"Got {text!r}: {error}.") from error
    if not isinstance(config, dict):
        raise _malformed(f"Got {text!r}.")
    return config


def _dict(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _malformed(f"Got {value!r} as {key!r}.")
    return value


def _addresses(job: str, tasks: Any) -> list[str]:
    if not isinstance(tasks, list) or not all(
        isinstance(task, str) for task in tasks
    ):
        raise _malformed(f"Got {tasks!r} as the addresses of {job!r}.")
    return tasks


def _index(value: Any) -> int | None:
    """Returns the index of a task. Some launchers write it as text."""
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise _malformed(f"Got {value!r} as the task's index.") from error


def _malformed(what_came: str) -> ClusterError:
    return ClusterError(
        f"Expected the environment variable TF_CONFIG to be JSON such as "
        f"{_EXAMPLE}. {what_came}"
    )
