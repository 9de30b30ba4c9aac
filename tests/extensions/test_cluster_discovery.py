"""Which processes there are, from what launchers tell: recorded environments.

No process is started and nothing connects.
"""

import contextlib
import json
import socket
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

import keras_conflux as kc
from keras_conflux._cluster import launchers
from keras_conflux._cluster import roll_call
from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import find_cluster
from keras_conflux._extensions.launchers.first_host import first_port
from keras_conflux._extensions.launchers.slurm import first_node

TWO = ["10.0.0.1:2222", "10.0.0.2:2222"]
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(TWO),
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}


def tf_config(cluster, task_type="worker", index=0, **more):
    task = {"type": task_type, "index": index}
    config = {"cluster": cluster, "task": task, **more}
    return {"TF_CONFIG": json.dumps(config)}


# 2 nodes x 2 tasks: `srun --nodes=2 --ntasks-per-node=2`, task 3.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
}
# `torchrun --nnodes=2 --nproc-per-node=2`, the last process.
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "4",
}
# A worker of a PyTorchJob.
PYTORCHJOB = {
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "train-master-0",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
VERTEX_AI = tf_config(
    {
        "chief": ["cmle-training-workerpool0-4dd2e9d2ba-0:2222"],
        "worker": [
            "cmle-training-workerpool1-4dd2e9d2ba-0:2222",
            "cmle-training-workerpool1-4dd2e9d2ba-1:2222",
        ],
    },
    index=1,
    environment="cloud",
    job='{"python_module": "trainer.task"}',
)
TFJOB = tf_config(
    {
        "chief": ["mnist-chief-0.kubeflow.svc:2222"],
        "worker": [
            "mnist-worker-0.kubeflow.svc:2222",
            "mnist-worker-1.kubeflow.svc:2222",
        ],
    },
    "chief",
    environment="cloud",
)


def of(environ):
    return find_cluster(environ=environ)


# --- the cluster ---------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "index", "message"),
    [
        ((), 0, "the address of every process"),
        (("a:1", "b:1", "a:1"), 0, "processes 0 and 2 .* 'a:1'"),
        (("a:1", "b:1"), 2, "0 to 1. Got 2"),
        (("a:1", "b:1"), -1, "0 to 1. Got -1"),
        (("a", "b:1"), 0, "Got 'a'"),
        (("a:0", "b:1"), 0, "Got 'a:0'"),
        (("a:65536", "b:1"), 0, "Got 'a:65536'"),
        (("a:x", "b:1"), 0, "Got 'a:x'"),
        ((":2222", "b:1"), 0, "Got ':2222'"),
        (("fd00::1", "b:1"), 0, "Got 'fd00::1'"),
    ],
)
def test_a_cluster_that_cannot_connect_is_refused(addresses, index, message):
    with pytest.raises(kc.ClusterError, match=f"a test: .*{message}"):
        Cluster(addresses, index, "a test")


def test_hosts_may_be_names_and_numbers_of_both_kinds():
    addresses = ("gpu-1.example.org:1", "10.0.0.1:65535", "[fd00::1]:2222")
    assert Cluster(addresses, 2, "a test").addresses == addresses


# --- arguments -----------------------------------------------------------


@pytest.mark.parametrize("addresses", [TWO, ", ".join(TWO)])
def test_arguments(addresses):
    found = find_cluster(addresses, 1, environ={})
    assert found == Cluster(tuple(TWO), 1, "the arguments of initialize")


def test_no_launcher_means_one_process():
    assert of({}) is None
    assert find_cluster(["a:1"], environ={}) is None


def test_without_extensions_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(launchers, "_launchers", [])
    with pytest.raises(kc.ClusterError, match=r"CONFLUX_EXTENSIONS=0.*index"):
        of(KERAS)
    assert find_cluster(TWO, 1).index == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"addresses": TWO}, "2 addresses, but no index"),
        ({"index": 1}, "index 1, but no addresses"),
        ({"addresses": TWO, "index": 2}, "0 to 1. Got 2"),
    ],
)
def test_incomplete_arguments(arguments, message):
    with pytest.raises(kc.ClusterError, match=message):
        find_cluster(**arguments, environ={})


# --- the variables of keras.distribution ---------------------------------


def test_keras_variables():
    found = of(KERAS)
    assert (found.addresses, found.index) == (tuple(TWO), 1)


def test_the_number_of_processes_may_be_left_out():
    assert of(KERAS | {"KERAS_DISTRIBUTION_NUM_PROCESSES": ""}) == of(KERAS)


def test_one_address_for_several_processes_means_ports_of_its_host():
    found = of(
        KERAS
        | {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:2222",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        }
    )
    assert found.addresses == tuple(f"10.0.0.1:{2222 + k}" for k in range(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1,b:1", "3", "0"), "all 3 .* Got 2: a:1, b:1.* each to each"),
        (("a:1,b:1", "1", "0"), "Got 2"),
        (("a:1,b:1", "2", "2"), "0 to 1. Got 2"),
        (("a:1,b:1", "2", ""), "_PROCESS_ID is not"),
        (("", "2", "0"), "_NUM_PROCESSES is set, but .*_ADDRESSES is not"),
        (("", "", "1"), "_PROCESS_ID is set, but .*_ADDRESSES is not"),
        (("", "1", "1"), "_ADDRESSES is not"),
        (("a:1,b:1", "two", "0"), "_NUM_PROCESSES to be a number.*'two'"),
    ],
)
def test_incomplete_keras_variables(given, message):
    with pytest.raises(kc.ClusterError, match=message):
        of(dict(zip(KERAS, given, strict=True)))


@pytest.mark.parametrize("given", [("", "1", "0"), ("a:1", "1", "0")])
def test_keras_variables_of_one_process(given):
    assert of(dict(zip(KERAS, given, strict=True))) is None


# --- TF_CONFIG -----------------------------------------------------------


def test_vertex_ai():
    found = of(VERTEX_AI)
    assert found.index == 2
    assert found.source == "TF_CONFIG"
    assert found.addresses[0] == "cmle-training-workerpool0-4dd2e9d2ba-0:2222"
    assert found.addresses[2] == "cmle-training-workerpool1-4dd2e9d2ba-1:2222"


def test_tfjob():
    found = of(TFJOB)
    assert (found.index, len(found.addresses)) == (0, 3)
    assert found.addresses[0] == "mnist-chief-0.kubeflow.svc:2222"


def test_the_master_is_the_chief():
    jobs = {"worker": ["a:1"], "master": ["b:1"]}
    assert of(tf_config(jobs)) == Cluster(("b:1", "a:1"), 1, "TF_CONFIG")


def test_the_index_may_be_text():
    assert of(tf_config({"worker": TWO}, index="1")).index == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "{}",
        '{"environment": "cloud"}',
        '{"cluster": null}',
        '{"cluster": {}, "task": {"type": "worker", "index": 0}}',
        tf_config({"chief": ["a:1"]}, "chief")["TF_CONFIG"],
        tf_config({"worker": ["a:1"]})["TF_CONFIG"],
    ],
)
def test_jobs_of_one_process(value):
    assert of({"TF_CONFIG": value}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "to be JSON such as .* Got '{'"),
        ("[]", r"Got '\[\]'"),
        ('{"cluster": [1]}', r"Got '.*\[1\]}': 'list' object"),
        (
            '{"cluster": {"worker": "a:1"}}',
            "'a:1' are no addresses of 'work",
        ),
        ({"cluster": {"worker": TWO}}, "type None"),
        (tf_config({"worker": TWO}, index=2), "index 2"),
        (tf_config({"worker": TWO}, index=-1), "index -1"),
        (tf_config({"worker": TWO}, index="x"), "Got .*: 'x'"),
        (tf_config({"worker": TWO}, "chief"), "the type 'chief'"),
        (tf_config({"worker": TWO}, "evaluator"), "checkpoints"),
        (tf_config({"worker": TWO, "ps": ["c:1"]}), "asynchronous"),
        (tf_config({"worker": TWO, "tpu": ["c:1"]}), "'tpu'. Expected only"),
        (
            tf_config({"worker": ["a:1"], "chief": ["b:1"], "master": ["c:1"]}),
            "one chief",
        ),
        ({"sparseCluster": {"worker": {"0": "a:1"}}}, "enableDynamicWorker"),
        (tf_config({"worker": ["a:1", "a:1"]}), "TF_CONFIG: processes 0 and 1"),
    ],
)
def test_malformed_tf_config(config, message):
    if isinstance(config, dict) and "TF_CONFIG" in config:
        config = config["TF_CONFIG"]
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(kc.ClusterError, match=message):
        of({"TF_CONFIG": text})


# --- Slurm ---------------------------------------------------------------


@pytest.fixture
def hosts(monkeypatch):
    """Returns the hosts that tasks of Slurm and torchrun come from."""
    found = ["first", "first", "10.0.0.2", "10.0.0.2"]
    asked = []

    def hosts_of_all(*arguments):
        asked.append(arguments)
        return found, None

    monkeypatch.setattr(roll_call, "hosts_of_all", hosts_of_all)
    return types.SimpleNamespace(found=found, asked=asked)


def test_slurm(hosts):
    port = first_port({}, 1234)
    found = find_cluster(environ=SLURM, seconds=7)
    assert hosts.asked == [(f"gpu01:{port}", 3, 4, 7)]
    assert found.addresses == (
        f"first:{port}",
        f"first:{port + 1}",
        f"10.0.0.2:{port}",
        f"10.0.0.2:{port + 1}",
    )
    assert (found.index, found.source) == (3, "Slurm")


def test_slurm_may_deal_tasks_out_in_any_order(hosts):
    hosts.found[:] = ["z1", "a1", "z1", "z1"]
    found = of(SLURM | {"SLURM_STEP_NODELIST": "z1,a1", "CONFLUX_PORT": "7000"})
    assert hosts.asked[0][0] == "z1:7000"
    assert found.addresses == ("z1:7000", "a1:7000", "z1:7001", "z1:7002")


def test_slurm_on_one_node_asks_nobody(hosts):
    found = of(SLURM | {"SLURM_STEP_NUM_NODES": "1", "CONFLUX_PORT": "7000"})
    assert found.addresses == tuple(f"localhost:{7000 + k}" for k in range(4))
    assert not hosts.asked


def test_slurm_with_a_first_task_anywhere():
    with pytest.raises(kc.ClusterError, match="srun --distribution=block"):
        of(SLURM | {"SLURM_DISTRIBUTION": "arbitrary"})


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": ""},  # a batch script
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # the same, as a step
        {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_outside_of_steps_of_several_tasks(changed):
    assert of(SLURM | changed) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_STEP_NUM_TASKS is set.*SLURM_PROCID is"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_STEP_NODELIST": ""}, "Got ''. Start the program with `srun`"),
        ({"CONFLUX_PORT": "x"}, "CONFLUX_PORT to be a number"),
        ({"CONFLUX_PORT": "65535"}, "Got 'first:65536'"),
    ],
)
def test_incomplete_slurm(hosts, changed, message):
    with pytest.raises(kc.ClusterError, match=message):
        of(SLURM | changed)


def test_ports_of_steps_that_run_at_a_time_differ(hosts):
    def port(job, step):
        ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return int(of(SLURM | ids).addresses[0].rpartition(":")[2])

    jobs = {port(job, 0) for job in range(900, 900 + 256)}
    steps = {port(900, step) for step in range(256)}
    assert len(jobs) == len(steps) == 256
    assert min(jobs) >= 1024
    assert max(jobs) + 63 < 32768
    assert {port % 64 for port in jobs} == {0}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-03,7],login1", "gpu01"),
        ("a[099-100]", "a099"),
        ("r[1-2]n[1,3]-ib", "r1n1-ib"),
        ("b,a", "b"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, expected):
    assert first_node(nodes) == expected


@pytest.mark.parametrize("nodes", ["", "a[1-2", ",b", "a[x]", "a]1[", "a[]"])
def test_malformed_lists_of_nodes(nodes):
    with pytest.raises(kc.ClusterError, match="to list nodes"):
        first_node(nodes)


# --- MPI -----------------------------------------------------------------


class World:
    """What mpi4py offers, as the second of two processes sees it."""

    first = ("a", 1, None)
    all_have_come = True

    def __init__(self, size=2):
        self.size = size

    def Ibarrier(self):
        return types.SimpleNamespace(Test=lambda: self.all_have_come)

    def Get_rank(self):
        return self.size - 1

    def Get_size(self):
        return self.size

    def allgather(self, own):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", own[1]))  # nobody else gets this port
        self.own = own
        return [self.first, own]


@pytest.fixture
def world(monkeypatch):
    """Returns a function that installs a mpi4py."""

    def install(world):
        module = types.ModuleType("mpi4py")
        module.MPI = types.SimpleNamespace(COMM_WORLD=world)
        monkeypatch.setitem(sys.modules, "mpi4py", module)
        return world

    return install


@pytest.mark.parametrize(
    "environ", [OPEN_MPI, {"PMI_RANK": "1", "PMI_SIZE": "2"}]
)
def test_mpi_exchanges_addresses(world, environ):
    installed = world(World())
    found = of(environ)
    name, port, _ = installed.own
    assert found == Cluster(("a:1", f"{name}:{port}"), 1, "MPI")


def test_mpi_on_one_host_needs_no_name_of_it(world):
    installed = world(World())
    installed.first = (socket.gethostname(), 1, None)
    found = of(OPEN_MPI)
    assert found.addresses == ("localhost:1", f"localhost:{installed.own[1]}")


def test_mpi_waits_as_long_as_is_said(world):
    world(World()).all_have_come = False
    with pytest.raises(kc.ClusterError, match=r"all of 2 .* in 0\.2 s"):
        find_cluster(environ=OPEN_MPI, seconds=0.2)


def test_mpi4py_of_another_mpi(world):
    world(World(1))
    with pytest.raises(kc.ClusterError, match=r"1 of 2, but .* 0 of 1.*pip"):
        of(OPEN_MPI)


def test_mpi_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(kc.ClusterError, match=r"pip install mpi4py.*KERAS_"):
        of(OPEN_MPI)


def test_mpi_with_one_process_needs_no_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert of({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None


@pytest.mark.parametrize("name", ["PMI_RANK", "PMI_SIZE"])
def test_incomplete_mpi(name):
    other = ({"PMI_RANK", "PMI_SIZE"} - {name}).pop()
    with pytest.raises(kc.ClusterError, match=f"{name} is set, but {other} is"):
        of({name: "1"})


# --- torchrun ------------------------------------------------------------


def test_torchrun_on_one_host():
    one_host = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    port = first_port({}, 29500)
    assert of(TORCHRUN | one_host) == Cluster(
        tuple(f"localhost:{port + rank}" for rank in range(4)), 3, "torchrun"
    )


def test_ports_of_torchrun():
    """Its agent has MASTER_PORT, and others may have the next ones."""
    for given in range(1, 65536):
        first = first_port({}, given, taken=given)
        assert given not in range(first, first + 64)
        assert 1024 <= first <= 32768 - 64
    used = {first_port({}, 29500 + k, taken=29500 + k) for k in range(128)}
    assert len(used) == 128
    assert first_port({"CONFLUX_PORT": "7000"}, 29500) == 7000


def free_port():
    with socket.socket() as bound:
        bound.bind(("", 0))
        return bound.getsockname()[1]


def meet(ranks, environ, seconds=60):
    """Returns what each rank finds; an error is one of its results."""

    def found(rank):
        mine = environ | {"RANK": str(rank)}
        try:
            return find_cluster(environ=mine, seconds=seconds)
        except kc.ClusterError as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(found, ranks))


@pytest.mark.parametrize(
    "unknown",
    [
        b"",
        b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        999 * b"[" + b"\n",
        5000 * b"x",
        b"1" * 500 + b"\n",
        b'["other 1", 3, 1]\n',
    ],
    ids=range(7),
)
def test_processes_of_torchrun_meet(unknown):
    """Also where strangers come, who say nothing or something else."""
    port = free_port()
    environ = TORCHRUN | {"WORLD_SIZE": "3", "CONFLUX_PORT": str(port)}
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(meet, [0], environ)
        for _ in range(8):
            stranger = stack.enter_context(socket.socket())
            while stranger.connect_ex(("127.0.0.1", port)):
                time.sleep(0.01)
            stranger.sendall(unknown)
        found = [*meet([1, 2], environ), *first.result(timeout=60)]
    addresses = tuple(f"127.0.0.1:{port + place}" for place in range(3))
    assert found == [Cluster(addresses, rank, "torchrun") for rank in (1, 2, 0)]


def test_addresses_over_hosts(hosts):
    """Each host has the same ports, however ranks are dealt out."""
    hosts.found[:] = ["first", "fd00::2", "first", "fd00::2"]
    found = of(TORCHRUN | {"CONFLUX_PORT": "7000"})
    assert found.addresses == (
        "first:7000",
        "[fd00::2]:7000",
        "first:7001",
        "[fd00::2]:7001",
    )


def test_processes_of_torchrun_that_do_not_meet(monkeypatch):
    monkeypatch.setattr(roll_call, "_LATE_SECONDS", 0.2)
    environ = TORCHRUN | {"CONFLUX_PORT": str(free_port())}
    (last,) = meet([3], environ, 0.5)
    assert "Process 0 does not answer at 127.0.0.1:" in str(last)
    assert "in 0.7 s" in str(last)
    for found in meet([0, 2], environ, 0.5):
        assert "in 0.5 s as process 1, process 3. Each must be" in str(found)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (first,) = meet([0], environ | {"CONFLUX_PORT": str(port)})
    assert "Set CONFLUX_PORT to another port" in str(first)


@pytest.fixture
def gpus_of_host(monkeypatch):
    """Returns a function that tells which of some GPUs a process takes."""

    def taken(seen, environ):
        found = []
        config = types.SimpleNamespace(
            get_visible_devices=lambda kind: list(range(seen)),
            set_visible_devices=lambda gpus, kind: found.append(gpus),
        )
        with monkeypatch.context() as patched:
            patched.setattr(tf, "config", config)
            of(environ)
        return found[0] if found else None

    return taken


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(8, [4, 5, 6, 7]), (3, [1]), (2, [1]), (1, None), (0, None)],
)
def test_processes_of_a_host_divide_its_gpus(
    gpus_of_host, hosts, world, seen, expected
):
    """Whoever has started them."""
    on_one_host = TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1"}
    assert gpus_of_host(seen, on_one_host) == expected
    assert gpus_of_host(seen, SLURM) == expected
    installed = world(World())
    assert gpus_of_host(seen, OPEN_MPI) is None  # the other is at host a
    installed.first = (socket.gethostname(), 1, None)
    assert gpus_of_host(seen, OPEN_MPI) == expected


@pytest.mark.parametrize(
    "bound",
    [
        {"SLURM_GPUS_PER_TASK": "4"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:4"},
        {"SLURM_GPU_BIND": "verbose,closest"},
    ],
)
def test_gpus_that_slurm_deals_out(gpus_of_host, hosts, bound):
    assert gpus_of_host(8, SLURM | bound) is None
    unbound = SLURM | bound | {"SLURM_GPU_BIND": "none"}
    assert gpus_of_host(8, unbound) == [4, 5, 6, 7]


def test_gpus_that_a_script_of_mpi_deals_out(gpus_of_host, world):
    world(World()).first = (socket.gethostname(), 1, "0,1")
    own = OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert gpus_of_host(2, own) is None
    own["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert gpus_of_host(2, own) == [1]


def test_torchrun_with_one_process():
    assert of({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": ""}, "WORLD_SIZE is set, but RANK is not"),
        ({"WORLD_SIZE": ""}, "RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT are not both"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not both"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT to be a number"),
    ],
)
def test_incomplete_torchrun(changed, message):
    with pytest.raises(kc.ClusterError, match=message):
        of(TORCHRUN | changed)


def test_a_torchrun_in_each_task_of_another():
    """`srun torchrun --nproc-per-node=4` is usual."""
    environ = TORCHRUN | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert of(SLURM | OPEN_MPI | environ).source == "torchrun"
    del environ["TORCHELASTIC_RUN_ID"]
    with pytest.raises(kc.ClusterError, match=r"of 4 processes, but .* of 8"):
        of(SLURM | environ)


# --- several at a time ---------------------------------------------------


def test_order_of_precedence(hosts):
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    place = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    environ = SLURM | two | place | pmi
    assert of(environ).source == "Slurm"
    environ |= tf_config({"worker": TWO})
    assert of(environ).source == "TF_CONFIG"
    environ |= KERAS
    assert of(environ).source == "KERAS_DISTRIBUTION_JOB_ADDRESSES"
    found = find_cluster(["a:1", "b:1", "c:1"], 0, environ=environ)
    assert found.source == "the arguments of initialize"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (KERAS | TFJOB, "NUM_PROCESSES tells of 2 .* TF_CONFIG of 3"),
        (
            KERAS | SLURM,
            "NUM_PROCESSES tells of 2 .* SLURM_STEP_NUM_TASKS of 4",
        ),
        (tf_config({"worker": ["a:1"]}) | SLURM, "TF_CONFIG tells of 1"),
        (TFJOB | OPEN_MPI, "TF_CONFIG .* OMPI_COMM_WORLD_SIZE of 2"),
        (TFJOB | PYTORCHJOB, "TF_CONFIG .* of 3 .* WORLD_SIZE of 2"),
    ],
)
def test_contradictions(environ, message):
    with pytest.raises(kc.ClusterError, match=message):
        of(environ)


def test_mpirun_in_a_step_of_slurm(world):
    world(World())  # its daemons are the step's tasks
    assert of(SLURM | OPEN_MPI).source == "MPI"
    assert of(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}).source == "MPI"


def test_one_process_of_mpi_may_start_others():
    environ = KERAS | {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert of(environ) == of(KERAS)


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM, TORCHRUN])
def test_initialize_waits_as_long_as_it_is_told(monkeypatch, world, environ):
    world(World()).all_have_come = False
    monkeypatch.setattr(roll_call, "_LATE_SECONDS", 0.0)
    monkeypatch.setenv("CONFLUX_PORT", str(free_port()))
    for name, value in environ.items():
        here = "localhost" if name == "SLURM_STEP_NODELIST" else value
        monkeypatch.setenv(name, here)
    with pytest.raises(kc.ClusterError, match=r"in 0\.3 s"):
        kc.initialize(timeout=0.3)
