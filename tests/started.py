"""Starts processes that train together."""

import os
import pathlib
import subprocess
import sys

import forked
from addresses import free_addresses
from addresses import tf_config
from conftest import ON_GPU

HERE = pathlib.Path(__file__).parent


def gpus_of(index, devices):
    """Returns what shows a process its own GPUs, or none of them."""
    if not ON_GPU:
        return "-1"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3"
    return ",".join(visible.split(",")[index * devices :][:devices])


def start(
    count,
    script,
    *arguments,
    devices=1,
    hosts=None,
    forks=False,
    **environment,
):
    """Starts the processes, each with its own `TF_CONFIG`.

    They run on this host, or each on another one of a `network`. As `forks`
    they start in less time, but all have the same order of sets.
    """
    addresses = free_addresses(count)
    inside = [[]] * count
    if hosts is not None:
        addresses = [f"{address}:2222" for address in hosts.values()]
        inside = [["ip", "netns", "exec", name] for name in hosts]
    program = [sys.executable, str(HERE / script), *map(str, arguments)]
    started = []
    for index in range(count):
        env = {
            **os.environ,
            "TF_CONFIG": tf_config(addresses, index),
            "CUDA_VISIBLE_DEVICES": gpus_of(index, devices),
            "CONFLUX_TEST_DEVICES": str(devices),
            **environment,
        }
        if forks:
            started.append(forked.Started(*program[1:], env=env))
            continue
        started.append(
            subprocess.Popen(
                [*inside[index], *program],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started
