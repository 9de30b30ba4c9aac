"""Connects processes through TensorFlow's servers, and talks to its service.

Each process runs a gRPC server of TensorFlow. The first one also runs the
coordination service, which knows who is alive and keeps short texts.
Collectives between processes go from server to server, or through NCCL.
"""

import copy
import signal
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

_JOB = "worker"
_FIRST = f"/job:{_JOB}/replica:0/task:0"
_INTERNAL = 13
_context: Any = context.context


def connect(
    addresses: Sequence[str],
    index: int,
    heartbeat_seconds: float,
    connect_seconds: float,
) -> None:
    """Starts this process' server. Returns when all processes have come."""
    # The module of this message has another name in TensorFlow 2.18.
    service = tf.compat.v1.ConfigProto().experimental.coordination_config
    job = service.coordinated_job_list.add(name=_JOB, num_tasks=len(addresses))
    running = _context()
    running.configure_collective_ops(
        collective_leader=_FIRST, device_filters=(f"/job:{_JOB}/task:{index}",)
    )
    running.configure_coordination_service(
        service_type="standalone",
        service_leader=_FIRST,
        coordinated_jobs=[job],
        heartbeat_timeout_in_ms=int(heartbeat_seconds * 1000),
        cluster_register_timeout_in_ms=int(connect_seconds * 1000),
    )
    cluster = tf.train.ClusterSpec({_JOB: list(addresses)})
    running.enable_collective_ops(
        tf.train.ServerDef(
            cluster=cluster.as_cluster_def(),
            default_session_config=copy.deepcopy(running.config),
            job_name=_JOB,
            task_index=index,
            protocol="grpc",
        )
    )
    # TensorFlow's service would keep SIGTERM as a note, and end nothing.
    before = signal.getsignal(signal.SIGTERM)
    running.ensure_initialized()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and before is not None:
        signal.signal(signal.SIGTERM, before)


def put_text(key: str, text: str) -> None:
    """Leaves a text for all processes."""
    _context().set_config_key_value(key, text)


def wait_for_text(key: str, seconds: float) -> str:
    """Returns a text, as soon as a process has left it."""
    return _context().get_config_key_value(key, int(seconds * 1000))


def report_error(text: str) -> None:
    """Ends the collectives of all processes with an error of this text."""
    _context().report_error_to_cluster(_INTERNAL, text)


def failure_of_any(count: int) -> tf.errors.OpError | None:
    """Asks the first process why one does no longer work, if one does."""
    try:
        states = _context().get_task_states([(_JOB, count)])
    except tf.errors.OpError as error:
        return error
    return next((state for state in states if state is not None), None)
