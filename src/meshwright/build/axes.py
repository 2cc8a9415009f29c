"""The mesh of a run: pipeline, then data, then tensor, so that ranks of one tensor group are neighbours."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.build.world import World, outside_of_modes
from meshwright.facts.strategy import Strategy
from meshwright.strategies import data_strategy

PIPELINE, TENSOR, BATCH = "pipeline", "tensor", "batch"


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where a rank lies on each axis, and with whom."""

    pipeline_ranks: int = 1
    data_ranks: int = 1
    tensor_ranks: int = 1
    rank: int = 0
    data_names: tuple[str, ...] = ()
    mesh: DeviceMesh | None = None

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.data_ranks * self.tensor_ranks)

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_ranks % self.data_ranks

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_ranks

    @property
    def data(self) -> DeviceMesh | None:
        """What the data strategy lies on; None for one rank."""
        if self.mesh is None or not self.data_names:
            return None
        return self.mesh[self.data_names if len(self.data_names) > 1 else self.data_names[0]]

    def data_on_host(self) -> DeviceMesh | None:
        """The same ranks as `data` as a mesh of CPUs. All ranks must call it."""
        if self.mesh is None or not self.data_names:
            return None
        assert self.mesh.mesh_dim_names is not None
        host = _mesh("cpu", dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True)))
        return host[self.data_names if len(self.data_names) > 1 else self.data_names[0]]

    @property
    def tensor(self) -> DeviceMesh | None:
        return self.mesh[TENSOR] if self.mesh is not None and self.tensor_ranks > 1 else None

    @property
    def pipeline(self) -> DeviceMesh | None:
        return self.mesh[PIPELINE] if self.mesh is not None and self.pipeline_ranks > 1 else None

    def batch_group(self, world: World) -> dist.ProcessGroup | None:
        """The ranks that share out one batch, whatever the data strategy makes of them. All ranks must call it."""
        if self.data_ranks == 1:
            return None
        if self.pipeline_ranks == self.tensor_ranks == 1:
            return world.group
        sizes = {PIPELINE: self.pipeline_ranks, BATCH: self.data_ranks, TENSOR: self.tensor_ranks}
        return _mesh(world.device.type, sizes).get_group(BATCH)

    def pipeline_group(self, members: Collection[int]) -> dist.ProcessGroup | None:
        """This rank's group of some places on the pipeline axis; None if it is not among them. All ranks must call."""
        inner = self.data_ranks * self.tensor_ranks
        lines = tuple(tuple(member * inner + offset for member in sorted(members)) for offset in range(inner))
        groups = _once(("groups", lines), lambda: [dist.new_group(line) for line in lines])
        return next((group for group, line in zip(groups, lines, strict=True) if self.rank in line), None)


def lay_axes(strategy: Strategy, world: World) -> Axes:
    """The axes of a resolved strategy over a world."""
    if strategy.traits.many_devices:
        return Axes()
    in_ranks = world.ranks > 1 or world.fake
    pipeline = strategy.pp * strategy.layers if in_ranks else 1
    tensor = strategy.tp * strategy.op
    data = data_strategy(strategy).axes(strategy)
    sizes = {PIPELINE: pipeline, **data, TENSOR: tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name in data}
    return Axes(
        pipeline_ranks=pipeline,
        data_ranks=strategy.data_ranks,
        tensor_ranks=tensor,
        rank=world.rank,
        data_names=tuple(data),
        mesh=_mesh(world.device.type, kept) if kept else None,
    )


def host_group(world: World) -> dist.ProcessGroup | None:
    """All ranks once more, with sockets of their own for talk in the background. All ranks must call it."""
    return _once("host", lambda: dist.new_group(backend="gloo")) if world.ranks > 1 else world.group


def _mesh(device: str, axes: dict[str, int]) -> DeviceMesh:
    names, sizes = tuple(axes), tuple(axes.values())
    mesh: DeviceMesh = _once((device, names, sizes), lambda: init_device_mesh(device, sizes, mesh_dim_names=names))
    return mesh


_made: dict[Any, tuple[Any, Any]] = {}


def _once(key: Any, make: Callable[[], Any]) -> Any:
    """What was made before in this world, or what is made now.

    A process group has threads of its own, which live as long as it does; and DTensor takes meshes of the same sizes
    for one and the same, so that results on a second would be found on the first. So there is one of each.
    """
    world = dist.group.WORLD
    if key not in _made or _made[key][0] is not world:
        with outside_of_modes():
            _made[key] = world, make()
    return _made[key][1]
