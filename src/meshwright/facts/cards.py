"""The devices that Meshwright knows: data sheet numbers, each with its source.

Matmul rates are dense: if a sheet prints the rate with sparsity, half of it is used. Memory is what CUDA reports to a
process, which is less than what is printed on the card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """The machine that a device usually comes in."""

    name: str
    gbps: float
    """Gbit/s to other nodes."""
    kind: str
    host_gib: float


@dataclass(frozen=True)
class Card:
    """One device."""

    sheet: str
    """The data sheet that flops, bandwidth and links come from."""
    gib: float
    """Memory available to a process."""
    tflops: Mapping[str, float]
    """Dense, by compute dtype; dtypes without hardware support are left out."""
    gb_s: float
    """GB/s of the device's memory."""
    within: tuple[str, float]
    """Kind of the link to its siblings, and its GB/s in one direction."""
    host_gb_s: float
    """GB/s to the host in one direction."""
    node: Node
    reach: Mapping[str, float] = field(default_factory=dict)
    """Measured shares of the peaks that a training step's kernels reach."""
    reach_source: str = ""


_DGX_1 = Node("DGX-1 data sheet: four 100 Gbit/s InfiniBand ports, 512 GB", 400, "infiniband", 512)
_V100_SERVER = Node("typical server: one 100 Gbit/s InfiniBand port, 384 GB", 100, "infiniband", 384)
_G4 = Node("AWS g4dn.12xlarge: 50 Gbit/s, 192 GiB", 50, "ethernet", 192)
_G5 = Node("AWS g5.48xlarge: 100 Gbit/s, 768 GiB", 100, "ethernet", 768)
_G2 = Node("Google g2-standard-96: 100 Gbit/s, 384 GB", 100, "ethernet", 384)
_G6E = Node("AWS g6e.48xlarge: 400 Gbit/s, 1536 GiB", 400, "ethernet", 1536)
_DESK = Node("assumed workstation: 10 Gbit/s Ethernet, 128 GB", 10, "ethernet", 128)
_DGX_A100_40 = Node("DGX A100 data sheet: eight 200 Gbit/s InfiniBand ports, 1 TB", 1600, "infiniband", 1024)
_DGX_A100_80 = Node("DGX A100 data sheet: eight 200 Gbit/s InfiniBand ports, 2 TB", 1600, "infiniband", 2048)
_PCIE_SERVER = Node("typical server: two 100 Gbit/s InfiniBand ports, 512 GB", 200, "infiniband", 512)
_H100_SERVER = Node("typical server: one 400 Gbit/s InfiniBand port, 1 TB", 400, "infiniband", 1024)
_DGX_H100 = Node("DGX H100 data sheet: eight 400 Gbit/s InfiniBand ports, 2 TB", 3200, "infiniband", 2048)
_H100_HALF = Node("nodes of 4 H100-96GB: four 200 Gbit/s InfiniBand ports, 768 GB", 800, "infiniband", 768)
_DGX_H200 = Node("DGX H200 data sheet: eight 400 Gbit/s InfiniBand ports, 2 TB", 3200, "infiniband", 2048)
_DGX_B200 = Node("DGX B200 data sheet: eight 400 Gbit/s InfiniBand ports, 2 TB", 3200, "infiniband", 2048)
_MI300X_NODE = Node("Instinct MI300X platform guides: eight 400 Gbit/s ports, 2 TB", 3200, "roce", 2048)
_ANY = Node("assumed: 10 Gbit/s Ethernet, 64 GB", 10, "ethernet", 64)

_PCIE_3, _PCIE_4, _PCIE_5 = 15.75, 31.5, 63.0
_V100 = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0, "fp16": 989.0}
_H100_PCIE = {"fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0}

_A10 = {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}
_A10G = {"fp32": 31.5, "tf32": 35.0, "bf16": 70.0, "fp16": 70.0}
_L4 = {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0}
_L40S = {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0}
_RTX_3090 = {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4}
_CPU = {"fp32": 0.05, "bf16": 0.006, "fp16": 0.006}

_H100_96_SHEET = "NVIDIA H100 data sheet, SXM5, except for 2.4 TB/s and 500 W, as users of the 96 GB card report"
_CPU_SHEET = "assumed for one core until probe measures it; bf16 was 7 to 10 times slower than fp32 where measured"

_V100_MESH, _FABRIC = ("nvlink-mesh", 150.0), ("infinity-fabric", 448.0)
_NVLINK_3, _NVLINK_4, _NVLINK_5 = ("nvlink", 300.0), ("nvlink-sharp", 450.0), ("nvlink-sharp", 900.0)


def _pcie(sheet: str, gib: float, tflops: Mapping[str, float], gb_s: float, lane: float, node: Node) -> Card:
    """A card that reaches its siblings over PCIe. Bridges that join two cards are not counted."""
    return Card(sheet, gib, tflops, gb_s, ("pcie", lane), lane, node)


CARDS: Mapping[str, Card] = {
    "V100-16GB": Card("NVIDIA V100 data sheet, SXM2", 15.77, _V100, 900, _V100_MESH, _PCIE_3, _DGX_1),
    "V100-32GB": Card("NVIDIA V100 data sheet, SXM2", 31.74, _V100, 900, _V100_MESH, _PCIE_3, _DGX_1),
    "V100-16GB-PCIe": _pcie("NVIDIA V100 data sheet, PCIe", 15.77, _V100_PCIE, 900, _PCIE_3, _V100_SERVER),
    "V100-32GB-PCIe": _pcie("NVIDIA V100 data sheet, PCIe", 31.74, _V100_PCIE, 900, _PCIE_3, _V100_SERVER),
    "T4": _pcie("NVIDIA T4 data sheet", 14.56, {"fp32": 8.1, "fp16": 65.0}, 320, _PCIE_3, _G4),
    "A10": _pcie("NVIDIA A10 data sheet", 22.1, _A10, 600, _PCIE_4, _G5),
    "A10G": _pcie("NVIDIA A10G data sheet", 22.1, _A10G, 600, _PCIE_4, _G5),
    "L4": _pcie("NVIDIA L4 data sheet", 22.0, _L4, 300, _PCIE_4, _G2),
    "L40S": _pcie("NVIDIA L40S data sheet", 44.4, _L40S, 864, _PCIE_4, _G6E),
    "RTX-3090": _pcie("NVIDIA GA102 white paper, fp32 accumulation", 23.69, _RTX_3090, 936, _PCIE_4, _DESK),
    "RTX-4090": _pcie("NVIDIA Ada white paper, fp32 accumulation", 23.64, _RTX_4090, 1008, _PCIE_4, _DESK),
    "A100-40GB": Card("NVIDIA A100 data sheet, SXM4", 39.4, _A100, 1555, _NVLINK_3, _PCIE_4, _DGX_A100_40),
    "A100-80GB": Card("NVIDIA A100 data sheet, SXM4", 79.2, _A100, 2039, _NVLINK_3, _PCIE_4, _DGX_A100_80),
    "A100-40GB-PCIe": _pcie("NVIDIA A100 data sheet, PCIe", 39.4, _A100, 1555, _PCIE_4, _PCIE_SERVER),
    "A100-80GB-PCIe": _pcie("NVIDIA A100 data sheet, PCIe", 79.2, _A100, 1935, _PCIE_4, _PCIE_SERVER),
    "H100-80GB": Card("NVIDIA H100 data sheet, SXM5", 79.1, _H100, 3350, _NVLINK_4, _PCIE_5, _DGX_H100),
    "H100-80GB-PCIe": _pcie("NVIDIA H100 data sheet, PCIe", 79.1, _H100_PCIE, 2000, _PCIE_5, _H100_SERVER),
    "H100-96GB": Card(_H100_96_SHEET, 94.5, _H100, 2400, _NVLINK_4, _PCIE_5, _H100_HALF),
    "H200-141GB": Card(
        *("NVIDIA H200 data sheet, SXM5", 139.7, _H100, 4800, _NVLINK_4, _PCIE_5, _DGX_H200),
        {"matmul": 0.84, "attention": 0.44, "stream": 0.55},
        "kernels of the steps of docs/data/plan_gpu.json, on one H200 with torch 2.11",
    ),
    "B200-180GB": Card("NVIDIA HGX B200 data sheet, divided by 8", 178.3, _B200, 7700, _NVLINK_5, _PCIE_5, _DGX_B200),
    "MI300X-192GB": Card("AMD Instinct MI300X data sheet", 191.7, _MI300X, 5300, _FABRIC, _PCIE_5, _MI300X_NODE),
    "cpu": Card(_CPU_SHEET, 8.0, _CPU, 10, ("shared-memory", 1.0), 10, _ANY),
}
"""By the name used in a cluster's text. A name without a form factor means SXM, if there is one."""

OTHER_NAMES: Mapping[str, str] = {
    **{"T4-16GB": "T4", "A10-24GB": "A10", "A10G-24GB": "A10G", "L4-24GB": "L4", "L40S-48GB": "L40S"},
    **{"RTX-3090-24GB": "RTX-3090", "RTX-4090-24GB": "RTX-4090", "RTX3090": "RTX-3090", "RTX4090": "RTX-4090"},
    **{"H100": "H100-80GB", "H100-PCIe": "H100-80GB-PCIe", "H200": "H200-141GB", "B200": "B200-180GB"},
    **{"B200-192GB": "B200-180GB", "MI300X": "MI300X-192GB"},
}
"""Aliases of one device of the catalogue. `A100` and `V100` would match two each, so they are not aliases."""

UNKNOWN_GPU = _pcie("assumed like an A10, for a GPU that is not in the catalogue", 22.0, _A10, 600, _PCIE_4, _ANY)
