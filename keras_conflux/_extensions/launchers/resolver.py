"""Processes that a cluster resolver of `tf.distribute` finds."""

from typing import Any

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.jobs import cluster_of_jobs


def resolve(resolver: Any) -> Cluster | None:
    """Returns the processes that a resolver finds.

    Args:
        resolver: Any `tf.distribute.cluster_resolver.ClusterResolver`.

    Returns:
        The tasks of `chief`, then of `worker`, or `None` if there are none.

    Raises:
        ClusterError: If there are other jobs, or the resolver does not tell
            which of the tasks this process is.
    """
    if not hasattr(resolver, "cluster_spec"):
        raise ClusterError(
            "Expected a tf.distribute.cluster_resolver.ClusterResolver. Got "
            f"{resolver!r}."
        )
    # First: some resolvers know the task of this process only afterwards.
    spec = resolver.cluster_spec()
    jobs = spec.as_dict() if spec else {}
    if not jobs:
        return None
    named = {job: spec.job_tasks(job) for job in jobs}
    return cluster_of_jobs(
        named,
        resolver.task_type,
        resolver.task_id,
        type(resolver).__name__,
    )
