"""How `meshmuon train` spreads a model over processes: the user's own part of a distributed run, in one file.

[Note: one batch on any number of processes]
Every process draws the same global batch and takes its share of it, so the number of processes changes no example and
no step. Losses and gradients are then means over the same windows, added in another order. That is rounding: about 1e-7
of a gradient in float32. Muon amplifies it (Newton-Schulz lifts small singular values) and so does every further step,
so there is no bound for a whole run. The tests hold the first 8 steps to 1e-3 nats, on 2 and 4 processes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshmuon.cli.gpt import GPT
from meshmuon.cli.settings import TrainConfig
from meshmuon.errors import message, one_of

Mode = Literal["none", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]

_TENSOR_PARALLEL = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This process's place among the others.

    Attributes:
        mode: How the model is spread.
        rank: Number of this process.
        size: Number of processes.
        data_rank: Which share of a batch is ours: tensor-parallel processes have the same.
        data_size: Number of shares.
        mesh: The processes as a grid, for modes that shard.
        joined: Whether we joined the job ourselves, and so have to leave it.
    """

    mode: Mode = "none"
    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    mesh: DeviceMesh | None = None
    joined: bool = False

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def __str__(self) -> str:
        if self.mode == "none":
            return "one process"
        grid = "" if self.mesh is None or self.mesh.ndim == 1 else f" ({' x '.join(map(str, self.mesh.shape))})"
        return f"{self.mode} on {self.size} processes{grid}"

    def check(self, config: TrainConfig) -> None:
        """Refuse what this number of processes cannot train.

        Args:
            config: What to train.

        Raises:
            ValueError: Says which number would fit.
        """
        if config.batch % self.data_size:
            do = f"Start a number of processes that divides {config.batch}."
            raise ValueError(message("parallel", found=f"{self.data_size} shares of a batch of {config.batch}", do=do))
        parts = self.size // self.data_size
        if config.model.heads % parts:
            found = f"{parts} tensor-parallel processes for {config.model.heads} heads"
            do = f"Start a number that divides {config.model.heads}."
            raise ValueError(message("parallel", found=found, do=do))
        if self.mode != "none" and config.optimizer.name in ("torch-muon", "reference"):
            found = f"{config.optimizer.name} under {self.mode}"
            raise ValueError(message("optimizers", found=found, do="It trains on one process only: leave it out."))

    def spread(self, model: GPT) -> nn.Module:
        """Wrap or shard a model, in place where torch does it so.

        Args:
            model: Whole, with the same weights on every process.

        Returns:
            What to call in training.
        """
        if self.mode == "ddp":
            devices = None if next(model.parameters()).device.type == "cpu" else [torch.cuda.current_device()]
            return DistributedDataParallel(model, device_ids=devices)
        data: Any = self.mesh
        if self.mode in ("tp", "fsdp+tp"):
            assert self.mesh is not None
            for block in model.blocks:
                parallelize_module(block, self.mesh["tp"], dict(_TENSOR_PARALLEL))
            data = self.mesh["dp"] if self.mode == "fsdp+tp" else None
        if data is not None:
            for block in model.blocks:
                fully_shard(block, mesh=data)
            # By default the root stays whole until a backward pass. After validation there is none, and a checkpoint
            # would find other tensors in the model than the optimizer has.
            fully_shard(model, mesh=data, reshard_after_forward=True)
        return model

    def share(self, batch: Tensor) -> Tensor:
        """Our part of a batch.

        Args:
            batch: The same on every process.

        Returns:
            As many windows as everyone else takes.
        """
        return batch.chunk(self.data_size)[self.data_rank]

    def mean(self, values: Tensor) -> Tensor:
        """Average over all processes.

        Args:
            values: Ours; written.

        Returns:
            The same on every process.
        """
        if self.mode != "none":
            dist.all_reduce(values)
            values /= self.size
        return values

    def told_by_first(self, value: str) -> str:
        """Take over what the first process says.

        Args:
            value: Read on the first process only.

        Returns:
            Its value.
        """
        box = [value]
        if self.mode != "none":
            dist.broadcast_object_list(box)
        return box[0]

    def on_first(self, action: Callable[[], None]) -> None:
        """Do something once, while the others wait.

        Args:
            action: Called on the first process.
        """
        if self.first:
            action()
        if self.mode != "none":
            dist.barrier()

    def leave(self) -> None:
        """End our part in the job, so that torch does not complain at exit."""
        if self.joined:
            dist.destroy_process_group()


ALONE = Parallel()


def start_parallel(mode: Mode, device: str) -> Parallel:
    """Join the job that torchrun started.

    Args:
        mode: How the model will be spread.
        device: "cpu" or "cuda".

    Returns:
        Our place in it.

    Raises:
        ValueError: No job, or one of a size that the mode cannot use.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
    if mode == "none":
        if started > 1:
            modes = one_of(word for word in get_args(Mode) if word != "none")
            raise ValueError(message("parallel", found=f"{started} processes, and no --parallel", do=f"Give {modes}."))
        return ALONE
    joining = not dist.is_initialized()
    if joining:
        if "RANK" not in os.environ:
            do = f"Start it as: torchrun --nproc-per-node 2 -m meshmuon train --parallel {mode}"
            raise ValueError(message("parallel", found=f"{mode}, but a single process", do=do))
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    if mode in ("hsdp", "fsdp+tp") and size % 2:
        raise ValueError(message("parallel", found=f"{mode} on {size} processes", do="Start an even number."))
    grids: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "fsdp": ((size,), ("dp",)),
        "hsdp": ((2, size // 2), ("replicas", "shards")),
        "tp": ((size,), ("tp",)),
        "fsdp+tp": ((size // 2, 2), ("dp", "tp")),
    }
    mesh = init_device_mesh(device, grids[mode][0], mesh_dim_names=grids[mode][1]) if mode in grids else None
    parts = {"tp": size, "fsdp+tp": 2}.get(mode, 1)
    return Parallel(
        mode=mode,
        rank=rank,
        size=size,
        data_rank=rank // parts,
        data_size=size // parts,
        mesh=mesh,
        joined=joining,
    )
