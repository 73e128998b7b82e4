"""Hardware constants: one small table, every number with its source."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshmuon.errors import message, one_of
from meshmuon.kernels.configs import Architecture
from meshmuon.plan.calibration import Calibration


@dataclass(frozen=True, slots=True)
class Link:
    """How a GPU reaches others.

    Attributes:
        name: What it is called.
        bandwidth: Bytes per second of one GPU, each way, by the data sheet.
        efficiency: The part of it that large transfers reach.
    """

    name: str
    bandwidth: float
    efficiency: float

    @property
    def useful(self) -> float:
        """Bytes per second, each way, that large transfers reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: What it is called.
        memory: Bytes of one GPU.
        calibration: How fast one GPU is.
        inside: The link between GPUs of one node.
        across: The link between nodes.
        node: GPUs in a node.
        architecture: What kernels are chosen for; ours are by default on "hopper".
    """

    name: str
    memory: float
    calibration: Calibration
    inside: Link
    across: Link
    node: int = 8
    architecture: Architecture = "hopper"


# Efficiencies are assumed: no run on several GPUs was made.
NVLINK_4 = Link("NVLink 4", 450e9, 0.80)  # 900 GB/s both ways: https://www.nvidia.com/en-us/data-center/h100/
NVLINK_5 = Link("NVLink 5", 900e9, 0.80)  # 1.8 TB/s both ways: https://www.nvidia.com/en-us/data-center/nvlink/
NETWORKS = {
    # ConnectX-7, 400 Gb/s, one for each GPU: https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
    "infiniband": Link("InfiniBand 400 Gb/s", 50e9, 0.85),
    # ConnectX-6 Dx, 100 Gb/s, one for each GPU: https://www.nvidia.com/en-us/networking/ethernet/connectx-6-dx/
    "ethernet": Link("Ethernet 100 Gb/s", 12.5e9, 0.80),
}

# One H200. Rates are those of cuBLAS under sustained load (bf16, less 4 % for fp16) at
# short sides of 4096, 2048, 1408 and 768; bandwidth is its device copy; a launch is the customary few microseconds.
# `python -m benchmarks.calibrate` compares them with measurements of our own code and prints better ones: measured
# numbers belong there, and what it prints belongs here.
_H200 = Calibration(rates=(660e12, 650e12, 640e12, 600e12), bandwidth=4.27e12, launch=5e-6)


def _like(base: Calibration, *, products: float, bandwidth: float) -> Calibration:
    """A device nobody has measured: the same efficiency at other peaks."""
    rates = tuple(rate * products for rate in base.rates)
    return dataclasses.replace(base, rates=rates, bandwidth=base.bandwidth * bandwidth)


# Peaks: dense 16-bit TFLOP/s and memory TB/s.
# H100 989 and 3.35, 80 GB: https://www.nvidia.com/en-us/data-center/h100/ (half of the value "with sparsity")
# H200 989 and 4.8, 141 GB: https://www.nvidia.com/en-us/data-center/h200/
# B200 2250 and 8.0, 180 GB: https://www.nvidia.com/en-us/data-center/dgx-b200/ and .../data-center/hgx/, an eighth each
_GPUS = {
    "h100": Hardware("h100", 80e9, _like(_H200, products=1.0, bandwidth=3.35 / 4.8), NVLINK_4, NETWORKS["infiniband"]),
    "h200": Hardware("h200", 141e9, _H200, NVLINK_4, NETWORKS["infiniband"]),
    "b200": Hardware(
        "b200",
        180e9,
        _like(_H200, products=2250 / 989, bandwidth=8.0 / 4.8),
        NVLINK_5,
        NETWORKS["infiniband"],
        architecture="blackwell",
    ),
}


def known_hardware(gpu: str | Hardware, network: str = "infiniband") -> Hardware:
    """Look up a machine.

    Args:
        gpu: "h100", "h200" or "b200", nodes of eight; or a description of your own.
        network: "infiniband" or "ethernet"; a description of your own has its own.

    Returns:
        Its constants.

    Raises:
        ValueError: If a name is not known.
    """
    if isinstance(gpu, Hardware):
        return gpu
    if gpu not in _GPUS:
        do = f"Use {one_of(_GPUS)}; or pass Hardware(...)"
        raise ValueError(message("hardware", found=repr(gpu), do=do))
    if network not in NETWORKS:
        raise ValueError(message("network", found=repr(network), do=f"Use {one_of(NETWORKS)}"))
    return dataclasses.replace(_GPUS[gpu], across=NETWORKS[network])
