"""Save a run's state: every rank writes its share, optionally in the background; only complete saves are published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from meshwright.assemble.axes import host_group
from meshwright.checkpoint.dcp_planner import PartsSavePlanner, share_out
from meshwright.checkpoint.folder import refuse_taken, sync_folder
from meshwright.checkpoint.frozen import refuse_changed
from meshwright.checkpoint.manifest import RunState
from meshwright.checkpoint.parts import HeldParts, Part, State
from meshwright.checkpoint.state import Snapshot, group_names, snapshot
from meshwright.checkpoint.storage import Writer
from meshwright.checkpoint.store_copy import Copy
from meshwright.checkpoint.trained import Trained
from meshwright.errors import CheckpointError, MeshwrightError, OutputError, one_line
from meshwright.facts.position import DataPosition

Box = tuple[str, tuple[int, ...]]
"""A tensor's name and the offsets of a part of it."""


class Saver:
    """Saves one run repeatedly. At most one save is in progress: the next one waits for it.

    A background save holds one copy, in host memory, of the bytes that this rank writes, and reuses that memory for the
    next save. A foreground save holds at most three tensors, and none that is already contiguous in host memory.
    """

    def __init__(self, trainer: Trained) -> None:
        """All ranks must create one together."""
        self._trainer = trainer
        self._group = host_group(trainer.world)
        self._groups = group_names(trainer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-save")
        self._running: Future[None] | None = None
        self._offered: list[object] = []
        self._share: frozenset[Box] = frozenset()
        self._copies: dict[Box, torch.Tensor] = {}

    def save(
        self,
        position: DataPosition,
        temporary: Path,
        publish: Callable[[Path], None],
        *,
        background: bool,
        copy: Copy | None = None,
    ) -> None:
        """Write to the folder `temporary` and have rank 0 call `publish` on it. All ranks call it between the same
        steps. With `copy`, files also go there as they are written, and it publishes them instead.

        Raises OutputError on all ranks if it fails; a background failure is raised by the next `wait`.
        """
        self.wait()
        taken = self._take(position)
        state = self._copied(taken.state) if background else taken.state
        self._running = self._thread.submit(self._write, state, taken.run_state, temporary, publish, copy)
        if not background:
            self.wait()

    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _take(self, position: DataPosition) -> Snapshot:
        """This rank's share of the state; an error on any rank is raised on all."""
        if self._trainer.base is not None:
            refuse_changed(self._trainer)
        taken: Snapshot | None = None
        problem = ""
        try:
            taken = snapshot(self._trainer, position, self._groups)
        except MeshwrightError as error:
            problem = str(error)
        planner = PartsSavePlanner()
        planner.set_up_planner(taken.state if taken else {})
        plan = planner.create_local_plan()
        offered: list[object] = [(item.index, item.tensor_data) for item in plan.items]
        answers = self._gather((problem, offered != self._offered))
        if problems := [problem for problem, _ in answers if problem]:
            raise CheckpointError(problems[0])
        assert taken is not None
        if any(changed for _, changed in answers):
            self._offered, self._copies = offered, {}
            self._share = self._agree(plan)
        return Snapshot(_only(taken.state, self._share), taken.run_state)

    def _agree(self, plan: SavePlan) -> frozenset[Box]:
        """Agree which of this rank's boxes it writes."""
        world = self._trainer.world
        if world.ranks == 1:
            own = share_out([plan])[0]
        else:
            plans: list[SavePlan] | None = [plan] * world.ranks if world.is_main else None
            dist.gather_object(plan, plans, group_dst=0, group=self._group)
            shares = share_out(plans) if plans is not None else None
            received: list[SavePlan | None] = [None]
            dist.scatter_object_list(received, shares, group_src=0, group=self._group)
            assert received[0] is not None
            own = received[0]
        return frozenset((item.index.fqn, tuple(item.index.offset or ())) for item in own.items)

    def _gather(self, value: object) -> list[tuple[str, bool]]:
        world = self._trainer.world
        values: list[object] = [value] * world.ranks
        if world.ranks > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def _copied(self, state: State) -> State:
        """Copy the state to memory that training does not touch."""
        copied = {
            name: HeldParts(held.shape, held.dtype, tuple(self._copy(name, part) for part in held.parts))
            for name, held in state.items()
        }
        if self._trainer.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, name: str, part: Part) -> Part:
        key = (name, part.offsets)
        if key not in self._copies:
            self._copies[key] = torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)
        return Part(part.offsets, self._copies[key].copy_(part.tensor, non_blocking=True))

    def _write(
        self,
        state: State,
        run_state: RunState,
        temporary: Path,
        publish: Callable[[Path], None],
        copy: Copy | None,
    ) -> None:
        world = self._trainer.world
        writer = Writer(temporary, world.rank, run_state, publish)
        if copy is not None:
            writer = Writer(temporary, world.rank, run_state, copy.publish, begin=copy.begin, written=copy.put)
        try:
            dcp.save(state, storage_writer=writer, planner=PartsSavePlanner(), process_group=self._group)
        except CheckpointException as failure:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise OutputError(_reason(failure)) from None
        if copy is not None:
            copy.ended(temporary)


def save_at(saver: Saver, position: DataPosition, target: Path) -> None:
    """Save to a path of the user's choice, now."""
    target = target.resolve()  # "." has no name
    temporary = target.with_name(f".{target.name}.part")

    def publish(folder: Path) -> None:
        refuse_taken(target)
        sync_folder(folder)
        folder.replace(target)
        sync_folder(target.parent)

    saver.save(position, temporary, publish, background=False)


def _only(state: State, share: frozenset[Box]) -> State:
    found = {}
    for name, held in state.items():
        distinct = {part.offsets: part for part in held.parts if (name, part.offsets) in share}
        if distinct:
            found[name] = HeldParts(held.shape, held.dtype, tuple(distinct.values()))
    return found


def _reason(failure: CheckpointException) -> str:
    """The first failed rank's reason in one sentence."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, MeshwrightError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"Rank {rank} could not write the checkpoint: {error.strerror}."
    return f"Rank {rank} could not write the checkpoint: {one_line(error)}"
