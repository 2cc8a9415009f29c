"""Save checkpoints while a run trains, and resume from the newest sound one. A failed save never ends the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.assemble.world import World
from meshwright.checkpoint.folder import CHECKPOINTS, RunFolder, list_checkpoints, read_latest
from meshwright.checkpoint.manifest import RunState, read_manifest
from meshwright.checkpoint.object_store import ObjectStore
from meshwright.checkpoint.store_copy import StoreCopy, fetch
from meshwright.errors import BadInput, CheckpointError, DamagedCheckpoint, OutputError, WrongCheckpoint, named
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import write_event


class Checkpoints:
    """Saves a run into its folder. A failed save is reported; the previous checkpoint stays and training goes on."""

    def __init__(
        self,
        run: Run,
        out: Path,
        *,
        every: int = 0,
        keep: int = 0,
        keep_every: int = 0,
        store: ObjectStore | None = None,
    ) -> None:
        """Save `every` N steps (0: only at the end); keep the newest `keep` (0: all) and multiples of `keep_every`.

        With `store`, checkpoints are kept there, and `out` is each node's own copy.
        """
        self._run, self._out, self._every, self._store = run, out, every, store
        self._folder = RunFolder(out / CHECKPOINTS, keep=keep, keep_every=keep_every)
        self._pending: tuple[int, float] | None = None
        self.saved: int | None = None
        """The last step known to be saved."""
        self.failures = 0
        self.stalls: list[float] = []
        """Seconds that each save blocked training."""
        self.when_saved: Callable[[int, Path], None] = lambda step, path: None
        """Called on every rank with each checkpoint that is complete: when the next save begins, or at the end."""

    def prepare(self) -> None:
        """Create the folder and remove what a killed run left. Call it before the first step."""
        if self._run.is_main or (self._store is not None and self._run.world.local_rank == 0):
            self._folder.folder.mkdir(parents=True, exist_ok=True)
            self._folder.clear()
        if self._run.is_main and self._store is not None:
            self._store.clear()
        self._run.world.gather(None)  # no rank may write before rank 0 has cleared the folder
        blind = [rank for rank, sees in enumerate(self._run.world.gather(self._folder.folder.is_dir())) if not sees]
        if blind:
            raise OutputError(f"Rank {blind[0]} does not see {named(self._out)}; use a folder that all nodes share.")

    def is_due(self) -> bool:
        """Whether the step just taken has to be saved."""
        return bool(self._every) and self._run.trainer.steps % self._every == 0

    def save(self, *, background: bool = True) -> None:
        """Save the step just taken, in the background or before returning. All ranks call it between the same steps."""
        begun = time.perf_counter()
        step = self._run.trainer.steps
        self.wait()
        try:
            temporary, publish = self._folder.temporary(step), self._folder.publish
            self._run.saver.save(
                self._run.data_position, temporary, publish, background=background, copy=self._copy(step)
            )
            self._pending = step, begun
        except BadInput as error:
            self._failed(step, error)
        self.stalls.append(time.perf_counter() - begun)
        if not background:
            self.wait()

    def _copy(self, step: int) -> StoreCopy | None:
        world = self._run.world
        leads = world.local_rank == 0 and not world.is_main
        return None if self._store is None else StoreCopy(self._store, self._folder, step, leads_other_node=leads)

    def wait(self) -> None:
        """Wait until the save in progress has ended; report it if it failed."""
        if self._pending is None:
            return
        (step, begun), self._pending = self._pending, None
        try:
            self._run.saver.wait()
            self.saved = step
            self._note("saved", step=step, seconds=round(time.perf_counter() - begun, 3))
            self.when_saved(step, self._folder.path_of(step))
        except BadInput as error:
            self._failed(step, error)

    def finish(self) -> None:
        """Save the last step, unless it is saved already."""
        self.wait()
        if self.saved != self._run.trainer.steps and self._run.trainer.steps:
            self.save(background=False)

    def resume(self) -> RunState | None:
        """Load the newest sound checkpoint; None if there is no checkpoint. All ranks call it."""
        (paths, *_) = self._run.world.gather([str(path) for path in _newest_first(self._folder.folder)])
        for path in paths:
            try:
                loaded = self._run.load(path)
            except WrongCheckpoint:
                raise
            except CheckpointError as error:  # damaged, empty or unreadable
                self._say(f"{error} Trying the one before.")
                self._note("damaged", checkpoint=Path(path).name, reason=str(error))
                continue
            self.saved = loaded.step
            self._say(_resumed(loaded, self._run))
            self._note("resumed", step=loaded.step, samples=loaded.samples, saved_under=loaded.strategy)
            return loaded
        if paths:
            raise CheckpointError(
                f"None of the {len(paths)} checkpoints in {named(self._folder.folder)} is sound; see above."
            )
        self._say(f"{named(self._out)} holds no checkpoint yet; starting at step 0.")
        return None

    def _failed(self, step: int, error: BadInput) -> None:
        self.failures += 1
        last = "nothing is saved yet" if self.saved is None else f"the last one is of step {self.saved}"
        self._say(f"warning: step {step} was not saved ({last}): {error}")
        self._note("save failed", step=step, reason=str(error))

    def _say(self, words: str) -> None:
        if self._run.is_main:
            print(words, file=sys.stderr, flush=True)

    def _note(self, event: str, **values: object) -> None:
        if self._run.is_main:
            write_event(self._out, event, strategy=str(self._run.strategy), ranks=self._run.world.ranks, **values)


def _resumed(loaded: RunState, run: Run) -> str:
    """What a resumed run goes on with, and what of it changed."""
    weights = "" if loaded.optimizer is not None else ", weights only: the optimizer starts anew"
    then, now = (f"{count} rank{'s' * (count > 1)}" for count in (loaded.ranks, run.world.ranks))
    lines = [f"resumed at step {loaded.step} (saved under {loaded.strategy} on {then}{weights})"]
    if loaded.ranks != run.world.ranks and loaded.optimizer is not None:
        lines.append(
            f"the global batch stays {run.trainer.job.global_batch} samples on {now}, so learning rate, schedule and "
            "data order stay as they are"
        )
    if loaded.ema is None and run.trainer.ema is not None:
        lines.append("the checkpoint has no averaged weights (ema): the average starts with the next step")
    if loaded.ema is not None and run.trainer.ema is None:
        lines.append("the job has no ema: the checkpoint's averaged weights are left behind")
    return "\n".join(lines)


def fetch_newest(store: ObjectStore, out: Path, world: World) -> None:
    """Bring the store's newest sound checkpoint into each node's folder, before a run is resumed. All ranks call it."""
    folder = RunFolder(out / CHECKPOINTS)
    (names, *_) = world.gather(store.complete() if world.is_main else [])
    for name in reversed(names):
        problem: tuple[bool, str] | None = None
        try:
            if world.local_rank == 0:
                fetch(store, name, folder)
        except (CheckpointError, OSError) as error:
            problem = isinstance(error, DamagedCheckpoint), str(error)
        problems = [one for one in world.gather(problem) if one is not None]
        if not problems:
            return
        is_damage, words = problems[0]
        if not is_damage:
            raise CheckpointError(words)
        if world.is_main:
            print(f"{words} Trying the one before.", file=sys.stderr, flush=True)
            write_event(out, "damaged", checkpoint=name, reason=words)
    if names:
        raise CheckpointError(f"None of the {len(names)} checkpoints in {store.url} is sound; see above.")


def saved_seed(out: Path, asked: int | None) -> int:
    """The seed of the run in a folder: a resumed run must keep its order of samples."""
    for path in _newest_first(out / CHECKPOINTS):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.run_state.optimizer is None:  # an imported checkpoint: no run, so no seed
            break
        seed = manifest.run_state.seed
        if asked is not None and asked != seed:
            raise WrongCheckpoint(
                f"--seed {asked} was given, but the run in {named(out)} has seed {seed}; leave it out."
            )
        return seed
    return asked or 0


def _newest_first(folder: Path) -> list[Path]:
    """The checkpoint that `latest` names, then the others, newest first."""
    others = list_checkpoints(folder)[::-1]
    latest = read_latest(folder)
    return [latest, *(path for path in others if path != latest)] if latest else others
