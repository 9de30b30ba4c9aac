"""What PyTorch can be told besides, so that each model runs at its best.

`tuned` makes the model that is trained. Words may be combined, as in `--tuning
replicate narrow-sums`.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from .cases import CASES
from .pytorch_models import Trained

WORDS = {
    "buckets": "DDP with buckets of 100 MB, a static graph, and no exchange of "
    "buffers",
    "whole": "DDP without splits of the compiled graph",
    "reducer": "DDP whose reductions are compiled, with compiled autograd",
    "replicate": "`replicate` of FSDP2 in place of DDP",
    "shard": "`fully_shard` of FSDP2 in place of DDP",
    "narrow-sums": "bfloat16 between the layers of a transformer",
    "max-autotune": "the mode `max-autotune-no-cudagraphs`",
    "cuda-graphs": "the mode `reduce-overhead`",
    "cudnn-attention": "attention by cuDNN alone",
    "torchvision": "ResNet-50 as torchvision has it",
}
_MODES = {
    "max-autotune": "max-autotune-no-cudagraphs",
    "cuda-graphs": "reduce-overhead",
}


def tuned(options: argparse.Namespace, device: torch.device) -> Any:
    """Returns the model, and the module to call in its place.

    Args:
        options: The command line.
        device: Where the model lies.
    """
    words = options.tuning
    _tell_torch(words)
    trained = Trained(
        options.model, "narrow-sums" in words, "torchvision" in words
    ).to(device)
    compiles = options.how == "torch"
    modes = [_MODES[word] for word in words if word in _MODES]
    settings: Any = {"mode": modes[0]} if modes else {}
    if "replicate" in words or "shard" in words:
        if not trained.has_adam:
            raise SystemExit(
                "FSDP2 has neither fused SGD nor weights in channels_last. "
                f"Received: {options.model}"
            )
        if compiles:
            for block in _blocks(trained):
                block.compile(**settings)
            trained.objective = torch.compile(trained.objective, **settings)
        _divide(trained, options, device)
        return trained, trained
    model: nn.Module = trained.to(memory_format=torch.channels_last)
    if options.devices > 1:
        more: Any = {}
        if "buckets" in words:
            more = {
                "bucket_cap_mb": 100,
                "static_graph": True,
                "broadcast_buffers": False,
            }
        elif "reducer" in words:
            more = {"bucket_cap_mb": 100}
        model = DistributedDataParallel(
            trained, gradient_as_bucket_view=True, **more
        )
    return trained, torch.compile(model, **settings) if compiles else model


@contextlib.contextmanager
def around_steps(words: list[str]) -> Iterator[None]:
    """What steps run in."""
    if "reducer" not in words:
        yield
        return
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(torch.compile, dynamic=False):
        yield


def _tell_torch(words: list[str]) -> None:
    """Sets what holds for the process."""
    import torch._dynamo

    if "whole" in words:
        torch._dynamo.config.optimize_ddp = False
    if "reducer" in words:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    if "cudnn-attention" in words:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)


def _blocks(trained: Trained) -> list[Any]:
    return [*getattr(trained.net, "blocks", [])]


def _divide(
    trained: Trained, options: argparse.Namespace, device: torch.device
) -> None:
    """Wraps each block, and the model, in what exchanges its gradients."""
    divide: Any = fsdp.fully_shard
    if "replicate" in options.tuning:
        from torch.distributed._composable import replicate_with_fsdp

        divide = replicate_with_fsdp.replicate
    mesh = init_device_mesh(device.type, (options.devices,))
    policy = wide = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if CASES[options.model].dtype == "mixed_bfloat16":
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in _blocks(trained):
        divide(block, mesh=mesh, mp_policy=policy)
    if getattr(trained.net, "has_wide_head", False):
        divide(trained.net.head, mesh=mesh, mp_policy=wide)
    divide(trained, mesh=mesh, mp_policy=policy)
