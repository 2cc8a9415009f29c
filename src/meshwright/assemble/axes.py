"""The mesh of a run: one dimension per axis, in the order of the axes' `place`."""

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
from meshwright.strategies.cuts import Cuts

DATA = "data"
"""The name of the data axis in `Axes.sizes`; its strategy may turn it into several mesh dimensions."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A rank's position on each axis, and the ranks it shares the axis with."""

    sizes: Mapping[str, int] = field(default_factory=lambda: {DATA: 1})
    """Ranks on each axis by mesh name, outermost first, including axes of one rank; without those in `data_parts`."""
    data_parts: Mapping[str, int] = field(default_factory=dict)
    """The axes that the data axis is divided into, outermost first: its own term's ranks, then those of the axes inside
    it. Empty if there are none."""
    stage_name: str = ""
    """The mesh name of the stage axis; "" if there is none."""
    inner_terms: tuple[AxisTerm, ...] = ()
    """The axes inside the data axis."""
    rank: int = 0
    data_names: tuple[str, ...] = ()
    mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    """The mesh with the dimensions of the data strategy. It differs from `mesh` if the strategy also reduces over an
    inner axis."""

    def place_on(self, name: str) -> int:
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
        """Whether this rank reports for the ranks that run the same layers on the same samples."""
        return all(self.place_on(t.traits.mesh_name) == 0 for t in self.inner_terms if not t.traits.splits_batch)

    @property
    def data(self) -> DeviceMesh | None:
        """The mesh of the data strategy; None for one rank."""
        return self._data_of(self.data_mesh)

    def data_on_host(self) -> DeviceMesh | None:
        """The ranks of `data` as a CPU mesh. All ranks must call it."""
        mesh = self.data_mesh
        if mesh is None or not self.data_names:
            return None
        assert mesh.mesh_dim_names is not None
        return self._data_of(_mesh("cpu", dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))))

    def _data_of(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        if mesh is None or not self.data_names:
            return None
        return mesh[self.data_names if len(self.data_names) > 1 else self.data_names[0]]

    @cached_property
    def inner(self) -> tuple[tuple[AxisTerm, DeviceMesh], ...]:
        """The axes that divide layers, outermost first, each with its mesh."""
        if self.mesh is None:
            return ()
        return tuple((term, self._mesh_of(term)[term.traits.mesh_name]) for term in self.inner_terms)

    def _mesh_of(self, term: AxisTerm) -> DeviceMesh:
        assert self.mesh is not None
        return self._divided if term.traits.splits_batch else self.mesh

    @cached_property
    def _divided(self) -> DeviceMesh:
        """The same ranks with the data axis as the axes that it is divided into."""
        assert self.mesh is not None
        dimensions: dict[str, int] = {}
        for name, size in self.sizes.items():
            dimensions |= self.data_parts if name == DATA else {name: size} if size > 1 else {}
        return _mesh(self.mesh.device_type, dimensions)

    def groups_inside_data(self) -> list[tuple[str, dist.ProcessGroup]]:
        """The groups that the data axis is divided into: of its own term, as "shard", and of the axes inside it."""
        if self.mesh is None or not self.data_parts:
            return []
        return [("shard" if name == DATA else name, self._divided.get_group(name)) for name in self.data_parts]

    def apart(self, cuts: Cuts) -> dict[str, DeviceMesh]:
        """The mesh of the data ranks that have the same part of a parameter, for each that the data axis divides."""
        if not self.data_parts:
            return {}
        inside = [mesh for term, mesh in self.inner if term.traits.splits_batch]
        return {name: self._divided[DATA] for name, cut in cuts.items() if any(cut.mesh is mesh for mesh in inside)}

    @cached_property
    def stages(self) -> DeviceMesh | None:
        """The mesh of the stage axis; None if there are no stages."""
        return self.mesh[self.stage_name] if self.mesh is not None and self.stage_name else None

    def batch_group(self, world: World) -> dist.ProcessGroup | None:
        """The ranks that split one batch, under any data strategy. All ranks must call it."""
        if self.data_ranks == 1:
            return None
        if self.data_ranks == prod(self.sizes.values()):
            return world.group
        sizes = {"batch" if name == DATA else name: size for name, size in self.sizes.items() if size > 1}
        return _mesh(world.device.type, sizes).get_group("batch")

    def stage_group(self, members: Collection[int]) -> dist.ProcessGroup | None:
        """This rank's group over `members` of the stage axis; None if it is not a member. All ranks must call it."""
        inner = prod(self.sizes.values()) // self.sizes[self.stage_name]
        lines = tuple(tuple(member * inner + offset for member in sorted(members)) for offset in range(inner))
        groups = _once(("groups", lines), lambda: [dist.new_group(line) for line in lines])
        return next((group for group, line in zip(groups, lines, strict=True) if self.rank in line), None)


def lay_axes(strategy: Strategy, world: World) -> Axes:
    if strategy.traits.many_devices:
        return Axes()
    in_ranks = world.ranks > 1 or world.fake
    in_ranks_terms = [term for term in strategy.axes if in_ranks or not term.traits.one_process]
    terms = {term.traits.mesh_name: term for term in in_ranks_terms if not term.traits.splits_batch}
    sizes = {name: strategy.data_ranks if name == DATA else 1 for name in _names()}
    sizes |= {name: term.size for name, term in terms.items()}
    data = data_strategy(strategy).axes(strategy)
    reduced = _dimensions(sizes | {term.traits.mesh_name: 1 for term in _summed_over(strategy)}, data)
    dimensions = _dimensions(sizes, _plain_data(strategy, data))
    return Axes(
        sizes=sizes,
        data_parts=_data_parts(strategy),
        stage_name=next((name for name, term in terms.items() if term.traits.staged), ""),
        inner_terms=tuple(term for term in strategy.inner_axes if term in in_ranks_terms),
        rank=world.rank,
        data_names=tuple(data),
        mesh=_mesh(world.device.type, dimensions) if dimensions else None,
        data_mesh=_mesh(world.device.type, reduced) if reduced else None,
    )


def mesh_sizes(strategy: Strategy) -> dict[str, int]:
    """The mesh dimensions of a resolved strategy that have more than one rank, outermost first."""
    model = {term.traits.mesh_name: term.size for term in strategy.axes if not term.traits.splits_batch}
    sizes = {name: 1 for name in _names()} | model
    data = _data_parts(strategy) or _plain_data(strategy, data_strategy(strategy).axes(strategy))
    dimensions = _dimensions(sizes, data)
    return {name: size for name, size in dimensions.items() if size > 1}


def _summed_over(strategy: Strategy) -> list[AxisTerm]:
    """The inner axes that the data strategy reduces over, together with its own."""
    return [term for term in strategy.axes if term.traits.shares_gradients]


def _plain_data(strategy: Strategy, data: Mapping[str, int]) -> Mapping[str, int]:
    """The data axis in the mesh of the model's axes."""
    return {DATA: strategy.data_ranks} if _summed_over(strategy) else data


def _names() -> list[str]:
    """The data axis and every registered model axis that does not lie inside it, outermost first."""
    outside = (traits for traits in MODEL_AXES.values() if not traits.splits_batch)
    places = {traits.mesh_name: traits.place for traits in outside} | {DATA: 0}
    return sorted(places, key=places.__getitem__)


def _data_parts(strategy: Strategy) -> dict[str, int]:
    """The data axis's own ranks and those of the axes inside it; empty if there are none inside."""
    inside = {term.traits.mesh_name: term.size for term in strategy.inner_axes if term.traits.splits_batch}
    return {DATA: strategy.data_ranks // strategy.batch_splits, **inside} if inside else {}


def _dimensions(sizes: Mapping[str, int], data: Mapping[str, int]) -> dict[str, int]:
    """The mesh dimensions: the data strategy's in place of the data axis, and model axes of several ranks."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found |= data if name == DATA else {name: size} if size > 1 else {}
    return found


def host_group(world: World, purpose: str = "host") -> dist.ProcessGroup | None:
    """A second gloo group of all ranks, for communication beside that of steps: one for each purpose, since threads
    must not share one. All ranks must call it."""
    return _once(purpose, lambda: dist.new_group(backend="gloo")) if world.ranks > 1 else world.group


def _mesh(device: str, axes: dict[str, int]) -> DeviceMesh:
    names, sizes = tuple(axes), tuple(axes.values())
    mesh: DeviceMesh = _once((device, names, sizes), lambda: init_device_mesh(device, sizes, mesh_dim_names=names))
    return mesh


_made: dict[Any, tuple[Any, Any]] = {}


def _once(key: Any, make: Callable[[], Any]) -> Any:
    """Make an object once per world and return it from then on.

    Every process group starts threads that live as long as it does. DTensor treats meshes of the same sizes as equal,
    so a result on a second mesh would turn up on the first.
    """
    world = dist.group.WORLD
    if key not in _made or _made[key][0] is not world:
        with outside_of_modes():
            _made[key] = world, make()
    return _made[key][1]
