"""Counting live memory on a CPU, where torch has no counter: every storage made under the mode, until it is gone."""

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshmuon import Muon
from tests.distributed.scenarios import shard


class LiveBytes(TorchDispatchMode):
    """The peak of bytes in storages that were made under the mode."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor:
                self._see(tensor, known)
        self.peak = max(self.peak, sum(size for size, _ in self.live.values()))
        return result

    def _see(self, tensor, known):
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if not storage.nbytes() or (pointer in known and pointer not in self.live):
            return
        size, holders = self.live.get(pointer, (storage.nbytes(), 0))
        self.live[pointer] = (size, holders + 1)
        weakref.finalize(tensor, self._forget, pointer)

    def _forget(self, pointer):
        if pointer in self.live:
            size, holders = self.live[pointer]
            if holders == 1:
                del self.live[pointer]
            else:
                self.live[pointer] = (size, holders - 1)


def peaks_with_gradients(max_in_flight):
    """Peaks of gradients and extra bytes together, without and with `release_grads`; gradients of the first bucket."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    peaks = []
    for release in (False, True):
        params = [torch.nn.Parameter(shard(torch.randn(96, 128), mesh, [Shard(0)])) for _ in range(24)]
        groups = [{"params": params, "algorithm": "muon"}]
        opt = Muon(groups, workspace_bytes=2**20, max_in_flight=max_in_flight, release_grads=release)
        found = []
        for _ in range(8):  # gloo's own thread lets go of what it has sent a little later at times: the least counts
            counter = LiveBytes()
            with counter:
                for p in params:
                    p.grad = DTensor.from_local(torch.ones_like(p._local_tensor), mesh, [Shard(0)], run_check=False)
                opt.step()
            found.append(counter.peak)
            del counter
        peaks.append(min(found[1:]))
    first = sum(params[0]._local_tensor.nbytes for _ in opt.plan.buckets[0].matrices)
    return *peaks, first


def peak_of_a_step(max_in_flight, workspace_bytes, release_grads=False):
    """The peak of extra bytes of one step over 24 sharded matrices, on this rank; and the size of the largest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(shard(torch.randn(96, 128), mesh, [Shard(0)])) for _ in range(24)]
    groups = [{"params": params, "algorithm": "muon"}]
    opt = Muon(groups, workspace_bytes=workspace_bytes, max_in_flight=max_in_flight, release_grads=release_grads)
    for _ in range(2):
        for p in params:
            p.grad = shard(torch.randn(96, 128), mesh, [Shard(0)])
        counter = LiveBytes()
        with counter:
            opt.step()
    return counter.peak, len(opt.plan.buckets)
