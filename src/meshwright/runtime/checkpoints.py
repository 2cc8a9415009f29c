"""The checkpoints of a run in training: saved every so many steps, never the end of it, taken up again after one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from meshwright.checkpoint.folder import CHECKPOINTS, RunFolder, list_checkpoints, read_latest
from meshwright.checkpoint.manifest import RunState, read_manifest
from meshwright.checkpoint.save import save_in
from meshwright.errors import BadInput, CheckpointError, OutputError, WrongCheckpoint, named
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import write_event


class Checkpoints:
    """Saves a run into its folder. A save that fails is reported, the one before stays, and the next is tried."""

    def __init__(self, run: Run, out: Path, *, every: int = 0, keep: int = 0, keep_every: int = 0) -> None:
        """`every` steps (0: only at the end); keep the newest `write_preset` (0: all) and multiples of `keep_every`."""
        self._run, self._out, self._every = run, out, every
        self._folder = RunFolder(out / CHECKPOINTS, keep=keep, keep_every=keep_every)
        self._under_way: tuple[int, float] | None = None
        self.saved: int | None = None
        """The last step that is known to be saved."""
        self.failures = 0
        self.stalls: list[float] = []
        """Seconds that training stood still for each save."""

    def prepare(self) -> None:
        """Before the first step: clear away what a killed run left."""
        if self._run.is_main:
            self._folder.folder.mkdir(parents=True, exist_ok=True)
            self._folder.clear()
        self._run.world.gather(None)  # nobody writes into a folder that is being cleared
        blind = [rank for rank, sees in enumerate(self._run.world.gather(self._folder.folder.is_dir())) if not sees]
        if blind:
            raise OutputError(
                f"Rank {blind[0]} does not see {named(self._out)}; all nodes need a folder that they share."
            )

    def is_due(self) -> bool:
        """After the step that was just taken."""
        return bool(self._every) and self._run.trainer.steps % self._every == 0

    def save(self, *, background: bool = True) -> None:
        """Begin to save the step that was just taken, or save it now. All ranks call it between the same steps."""
        begun = time.perf_counter()
        step = self._run.trainer.steps
        self.wait()
        try:
            save_in(self._run.saver, self._run.position, step, self._folder, background=background)
            self._under_way = step, begun
        except BadInput as error:
            self._failed(step, error)
        self.stalls.append(time.perf_counter() - begun)
        if not background:
            self.wait()

    def wait(self) -> None:
        """Until no save is under way; says so if the last one failed."""
        if self._under_way is None:
            return
        (step, begun), self._under_way = self._under_way, None
        try:
            self._run.saver.wait()
            self.saved = step
            self._note("saved", step=step, seconds=round(time.perf_counter() - begun, 3))
        except BadInput as error:
            self._failed(step, error)

    def finish(self) -> None:
        """Save where the run ends, if that is not saved yet."""
        self.wait()
        if self.saved != self._run.trainer.steps and self._run.trainer.steps:
            self.save(background=False)

    def resume(self) -> RunState | None:
        """Take up the newest sound checkpoint; None if there is none at all. All ranks call it."""
        (paths, *_) = self._run.world.gather([str(path) for path in _newest_first(self._folder.folder)])
        for path in paths:
            try:
                loaded = self._run.load(path)
            except WrongCheckpoint:
                raise
            except CheckpointError as error:  # damaged, emptied or not to be read
                self._say(f"{error} Going back to the one before.")
                self._note("damaged", checkpoint=Path(path).name, reason=str(error))
                continue
            self.saved = loaded.step
            self._say(self._welcome(loaded))
            self._note("resumed", step=loaded.step, samples=loaded.samples, saved_under=loaded.strategy)
            return loaded
        if paths:
            raise CheckpointError(
                f"None of the {len(paths)} checkpoints in {named(self._folder.folder)} is sound; see above."
            )
        self._say(f"{named(self._out)} holds no checkpoint yet; starting at step 0.")
        return None

    def _welcome(self, loaded: RunState) -> str:
        weights = "" if loaded.optimizer is not None else ", weights only: the optimizer starts anew"
        ranks = f"{loaded.ranks} rank{'s' * (loaded.ranks > 1)}"
        return f"resumed at step {loaded.step} (saved under {loaded.strategy} on {ranks}{weights})"

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


def saved_seed(out: Path, asked: int | None) -> int:
    """The seed of the run that a folder holds: its order of samples is part of what is resumed."""
    for path in _newest_first(out / CHECKPOINTS):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        # An imported one has no run behind it, so no seed either.
        if manifest.run_state.optimizer is None:
            break
        if asked is not None and asked != manifest.run_state.seed:
            raise WrongCheckpoint(
                f"--seed {asked} was asked for, but the run in {named(out)} has seed {manifest.run_state.seed}."
            )
        return manifest.run_state.seed
    return asked or 0


def _newest_first(folder: Path) -> list[Path]:
    """What `latest` names, then the others from the newest on."""
    others = list_checkpoints(folder)[::-1]
    latest = read_latest(folder)
    return [latest, *(path for path in others if path != latest)] if latest else others
