"""Times PyTorch in a process of its own and prints JSON.

    cd examples; python -m benchmarks.pytorch MODEL HOW DEVICES

HOW is `torch`, compiled by `torch.compile`, or `torch-eager`. Several devices
train under `DistributedDataParallel`, in a process each, over NCCL or, on CPUs,
gloo. This file is started as a part of the package `benchmarks`, as whoever has
PyTorch need not have what the package imports.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from . import measured
from .cases import CASES
from .pytorch_models import Trained

_ON_GPU = torch.cuda.is_available()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.pytorch")
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("how", choices=["torch", "torch-eager"])
    parser.add_argument("devices", type=int)
    measured.add_options(parser)
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
    case = CASES[options.model]
    trained = Trained(options.model).to(
        device, memory_format=torch.channels_last
    )
    optimizer = trained.optimizer()
    model: torch.nn.Module = trained
    if options.devices > 1:
        model = DistributedDataParallel(trained, gradient_as_bucket_view=True)
    if options.how == "torch":
        model = torch.compile(model)
    half = case.dtype == "mixed_bfloat16"
    host = _part(options)
    clock, means = measured.Clock(), []
    for _ in range(options.epochs + 1):
        clock.start()
        total = torch.zeros([], device=device)
        for inputs, labels in _batches(host, device, options.steps):
            optimizer.zero_grad(set_to_none=True)
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


def _part(options: argparse.Namespace) -> list[torch.Tensor]:
    """Returns the batch of this process, where it can be copied from fast."""
    case, rank = CASES[options.model], distributed.get_rank()
    size = options.batch or case.batch_size
    rows = slice(rank * size, (rank + 1) * size)
    parts = [
        torch.from_numpy(array[rows]).contiguous()
        for array in case.data(size * options.devices)
    ]
    return [part.pin_memory() for part in parts] if _ON_GPU else parts


def _batches(
    host: list[torch.Tensor], device: torch.device, steps: int
) -> Iterator[list[torch.Tensor]]:
    """Yields batches, each copied to the GPU while the one before is used."""
    if not _ON_GPU:
        yield from [host] * steps
        return
    copies, work = torch.cuda.Stream(), torch.cuda.current_stream()

    def copied() -> list[torch.Tensor]:
        with torch.cuda.stream(copies):
            return [each.to(device, non_blocking=True) for each in host]

    following = copied()
    for step in range(steps):
        work.wait_stream(copies)
        batch = following
        for each in batch:
            each.record_stream(work)
        if step + 1 < steps:
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
