"""Times PyTorch in a process of its own and prints JSON.

    cd examples; python -m benchmarks.pytorch MODEL HOW DEVICES

HOW is `torch`, compiled by `torch.compile`, or `torch-eager`. Several devices
train under `DistributedDataParallel`, in a process each, over NCCL or, on CPUs,
gloo; `--tuning` names other ways. This file is started as a part of the package
`benchmarks`, as whoever has PyTorch need not have what the package imports.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed
from torch import multiprocessing

from . import measured
from .cases import CASES
from .pytorch_models import NETWORKS
from .pytorch_tuning import WORDS
from .pytorch_tuning import around_steps
from .pytorch_tuning import tuned

_ON_GPU = torch.cuda.is_available()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.pytorch")
    parser.add_argument("model", choices=list(NETWORKS))
    parser.add_argument("how", choices=["torch", "torch-eager"])
    parser.add_argument("devices", type=int)
    measured.add_options(parser)
    measured.add_tuning(parser, WORDS)
    parser.set_defaults(jit="auto", execution=1)
    return parser.parse_args(arguments)


def train(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Trains on one device, with the others; the first one prints.

    Args:
        rank: Which of the devices.
        options: The command line.
        meeting: A file that does not exist, where the processes meet.
    """
    device = torch.device("cuda", rank) if _ON_GPU else torch.device("cpu")
    if _ON_GPU:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.devices))
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32, as TensorFlow and JAX
    torch.manual_seed(0)
    distributed.init_process_group(
        "nccl" if _ON_GPU else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=options.devices,
        device_id=device if _ON_GPU else None,
    )
    clock, losses = _epochs(device, options)
    all_peaks: list = [None] * options.devices
    peak = torch.cuda.max_memory_allocated() if _ON_GPU else None
    distributed.all_gather_object(all_peaks, peak)
    if rank == 0:
        peaks = [each for each in all_peaks if each is not None]
        versions = {"torch": torch.__version__}
        gpu = torch.cuda.get_device_name() if _ON_GPU else None
        found = measured.result(options, clock, losses, peaks, gpu, versions)
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _epochs(
    device: torch.device, options: argparse.Namespace
) -> tuple[measured.Clock, list[float]]:
    """Trains for one epoch that is not timed and some that are."""
    half = CASES[options.model].dtype == "mixed_bfloat16"
    trained, model = tuned(options, device)
    optimizer = trained.optimizer()
    host = _parts(options)
    clock, means = measured.Clock(), []
    for _ in range(options.epochs + 1):
        clock.start()
        total = torch.zeros([], device=device)
        for inputs, labels in _batches(host, device, options.steps):
            optimizer.zero_grad(set_to_none=True)
            with around_steps(options.tuning):
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    loss = model(inputs, labels)
                loss.backward()
            optimizer.step()
            total += loss.detach()
        means.append(total / options.steps)
        total.item()  # waits
        clock.stop()
    mean = torch.stack(means) / options.devices
    distributed.all_reduce(mean)
    return clock, mean.tolist()


Batch = list[torch.Tensor]


def _parts(options: argparse.Namespace) -> list[Batch]:
    """Returns the batches of this process, where they are copied from fast."""
    rank = distributed.get_rank()
    batches = measured.batches(options)
    size = len(batches[0][0]) // options.devices
    rows = slice(rank * size, (rank + 1) * size)
    parts = [
        [torch.from_numpy(array[rows]).contiguous() for array in batch]
        for batch in batches
    ]
    if not _ON_GPU:
        return parts
    return [[each.pin_memory() for each in part] for part in parts]


def _batches(
    host: list[Batch], device: torch.device, steps: int
) -> Iterator[Batch]:
    """Yields batches, each copied to the GPU while the one before is used."""
    parts = itertools.islice(itertools.cycle(host), steps)
    if not _ON_GPU:
        yield from parts
        return
    copies, work = torch.cuda.Stream(), torch.cuda.current_stream()

    def copied() -> Batch | None:
        part = next(parts, None)
        if part is None:
            return None
        with torch.cuda.stream(copies):
            return [each.to(device, non_blocking=True) for each in part]

    following = copied()
    while following is not None:
        work.wait_stream(copies)
        batch = following
        for each in batch:
            each.record_stream(work)
        following = copied()
        yield batch


def main() -> None:
    """Trains in as many processes as devices; one prints a line of JSON."""
    options = parse(sys.argv[1:])
    if _ON_GPU and torch.cuda.device_count() < options.devices:
        raise SystemExit(
            f"Expected {options.devices} devices. PyTorch has "
            f"{torch.cuda.device_count()}."
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = options, str(Path(folder, "meeting"))
        if options.devices == 1:
            train(0, *arguments)
        else:
            multiprocessing.spawn(train, arguments, nprocs=options.devices)


if __name__ == "__main__":
    main()
