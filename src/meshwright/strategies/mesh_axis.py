"""What collectives ask of a mesh axis: its size, this rank's place and group, and how a divided dim is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshAxis:
    """What a collective asks of a mesh; the mesh takes microseconds to answer."""

    size: int
    rank: int
    group: dist.ProcessGroup
    name: str
    """The group's name."""
    balanced: bool = False
    """Whether a rank's part is two chunks of 2 x `size`, one counted from each end, and not one of `size`."""


def axis_of(mesh: DeviceMesh) -> MeshAxis:
    found: MeshAxis | None = mesh.__dict__.get("_meshwright_axis")
    if found is None:
        found = mesh.__dict__["_meshwright_axis"] = _read_axis(mesh)
    return found


def _read_axis(mesh: DeviceMesh) -> MeshAxis:
    group = mesh.get_group()
    return MeshAxis(mesh.size(), mesh.get_local_rank(), group, getattr(group, "group_name", ""))


def group_of(mesh: DeviceMesh) -> str:
    """The name of a mesh's group, for functional collectives."""
    return axis_of(mesh).name


def place_in(mesh: DeviceMesh) -> tuple[int, int, str]:
    """This rank, the number of ranks, and the name of the group of a mesh, for functional collectives."""
    axis = axis_of(mesh)
    return axis.rank, axis.size, axis.name


def balance(mesh: DeviceMesh, *, wanted: bool) -> None:
    """Let a rank's part be two chunks, the one as far from the beginning as the other is from the end, or one.

    Under a causal mask, early tokens attend to few others and late ones to many: so all ranks have the same work.
    """
    mesh.__dict__["_meshwright_axis"] = replace(_read_axis(mesh), balanced=wanted)


def chunks_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], int]:
    """The chunks of a divided dim that this rank holds, and the number of chunks in all."""
    axis = axis_of(mesh)
    if axis.balanced:
        return (axis.rank, 2 * axis.size - 1 - axis.rank), 2 * axis.size
    return (axis.rank,), axis.size


def divides(size: int, mesh: DeviceMesh) -> bool:
    """Whether the ranks of an axis can have even parts of a dim."""
    axis = axis_of(mesh)
    return size % (2 * axis.size if axis.balanced else axis.size) == 0
