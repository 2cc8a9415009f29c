"""The mesh of a run: one dimension for each axis, ordered by the place that the axis asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.assemble.world import World, outside_of_modes
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.strategies import data_strategy

DATA = "data"
"""The data axis in `Axes.sizes`, whatever mesh dimensions its strategy makes of it."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where a rank stands on each axis, and which ranks share it."""

    sizes: Mapping[str, int] = field(default_factory=lambda: {DATA: 1})
    """Ranks on each axis by mesh name, from the outermost to the innermost; axes of one rank too."""
    stage_name: str = ""
    """The mesh name of the axis that has the stages; "" where there is none."""
    inner_terms: tuple[AxisTerm, ...] = ()
    """The axes inside the data axis."""
    rank: int = 0
    data_names: tuple[str, ...] = ()
    mesh: DeviceMesh | None = None

    def place_on(self, name: str) -> int:
        """This rank's place on an axis."""
        names = list(self.sizes)
        inside = prod(self.sizes[other] for other in names[names.index(name) + 1 :])
        return self.rank // inside % self.sizes[name]

    @property
    def data_ranks(self) -> int:
        return self.sizes[DATA]

    @property
    def data_rank(self) -> int:
        return self.place_on(DATA)

    @property
    def stage_rank(self) -> int:
        return self.place_on(self.stage_name) if self.stage_name else 0

    @property
    def first_inside(self) -> bool:
        """Whether this rank speaks for those that run the same layers on the same samples."""
        return all(self.place_on(term.traits.mesh_name) == 0 for term in self.inner_terms)

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

    @cached_property
    def inner(self) -> tuple[tuple[AxisTerm, DeviceMesh], ...]:
        """The axes that divide layers, outermost first, each with its mesh."""
        if self.mesh is None:
            return ()
        return tuple((term, self.mesh[term.traits.mesh_name]) for term in self.inner_terms)

    @cached_property
    def stages(self) -> DeviceMesh | None:
        """The ranks that have one stage each; None where there are no stages."""
        return self.mesh[self.stage_name] if self.mesh is not None and self.stage_name else None

    def batch_group(self, world: World) -> dist.ProcessGroup | None:
        """The ranks that share out one batch, whatever the data strategy makes of them. All ranks must call it."""
        if self.data_ranks == 1:
            return None
        if self.data_ranks == prod(self.sizes.values()):
            return world.group
        sizes = {"batch" if name == DATA else name: size for name, size in self.sizes.items() if size > 1}
        return _mesh(world.device.type, sizes).get_group("batch")

    def stage_group(self, members: Collection[int]) -> dist.ProcessGroup | None:
        """This rank's group of some places on the stage axis; None if it is not among them. All ranks must call it."""
        inner = prod(self.sizes.values()) // self.sizes[self.stage_name]
        lines = tuple(tuple(member * inner + offset for member in sorted(members)) for offset in range(inner))
        groups = _once(("groups", lines), lambda: [dist.new_group(line) for line in lines])
        return next((group for group, line in zip(groups, lines, strict=True) if self.rank in line), None)


def lay_axes(strategy: Strategy, world: World) -> Axes:
    """The axes of a resolved strategy over a world."""
    if strategy.traits.many_devices:
        return Axes()
    in_ranks = world.ranks > 1 or world.fake
    terms = {term.traits.mesh_name: term for term in strategy.axes if in_ranks or not term.traits.one_process}
    sizes = {name: strategy.data_ranks if name == DATA else 1 for name in _names()}
    sizes |= {name: term.size for name, term in terms.items()}
    data = data_strategy(strategy).axes(strategy)
    dimensions = _dimensions(sizes, data)
    return Axes(
        sizes=sizes,
        stage_name=next((name for name, term in terms.items() if term.traits.staged), ""),
        inner_terms=tuple(term for term in strategy.inner_axes if term.traits.mesh_name in terms),
        rank=world.rank,
        data_names=tuple(data),
        mesh=_mesh(world.device.type, dimensions) if dimensions else None,
    )


def mesh_sizes(strategy: Strategy) -> dict[str, int]:
    """The mesh of a resolved strategy: dimensions of more than one rank, outermost first."""
    sizes = {name: 1 for name in _names()} | {term.traits.mesh_name: term.size for term in strategy.axes}
    dimensions = _dimensions(sizes, data_strategy(strategy).axes(strategy))
    return {name: size for name, size in dimensions.items() if size > 1}


def _names() -> list[str]:
    """The data axis and every registered model axis in the order of the mesh."""
    places = {traits.mesh_name: traits.place for traits in MODEL_AXES.values()} | {DATA: 0}
    return sorted(places, key=places.__getitem__)


def _dimensions(sizes: Mapping[str, int], data: Mapping[str, int]) -> dict[str, int]:
    """The mesh's dimensions: those of the data strategy in the place of the data axis, and axes of several ranks."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found |= data if name == DATA else {name: size} if size > 1 else {}
    return found


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
