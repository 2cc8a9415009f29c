"""Run a script on the CPU with stand-ins for what it would download, and note the loss of every backward pass.

python run_script.py OUT.json FOLDER NAME=>SCRIPT.py[;;NAME=>SCRIPT.py] [ARGUMENTS]

Under torchrun, each rank writes OUT.json with its rank before the suffix. Several versions of a script run one after
the other in the same processes.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STAND_INS = Path(__file__).parent / "stand_ins"
BACKWARD = torch.Tensor.backward


def with_stand_ins(folder: Path) -> None:
    """Let scripts import our stand-ins; transformers comes first, because it would use torchvision's inner parts."""
    if any("transformers" in file.read_text() for file in folder.rglob("*.py") if "peft" not in file.parts):
        from transformers.models.bert import modeling_bert  # noqa: F401
        from transformers.models.t5 import modeling_t5  # noqa: F401

        sys.path.insert(0, str(STAND_INS))
        import tiny_transformers

        tiny_transformers.install()
    sys.path[:0] = [str(folder), str(STAND_INS)]


def on_cpu() -> None:
    """Let scripts that name GPUs and NCCL run on the CPU, and several of them in one process group."""
    from torch.nn.parallel import DistributedDataParallel

    initialise, ddp = dist.init_process_group, DistributedDataParallel.__init__

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            initialise("gloo", *args, **kwargs)

    def wrap(self: Any, module: Any, device_ids: Any = None, **kwargs: Any) -> None:
        ddp(self, module, **kwargs)

    dist.init_process_group, dist.destroy_process_group = init, lambda *args: None
    DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    for owner in (torch.Tensor, torch.nn.Module):
        moved: Any = owner.to

        def to(self: Any, *args: Any, moved: Any = moved, **kwargs: Any) -> Any:
            return self if args and type(args[0]) is int else moved(self, *args, **kwargs)

        owner.to = to  # type: ignore[method-assign, assignment]


def note_losses(losses: list[float]) -> None:
    """Add the loss of every backward pass."""

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not sys._getframe(1).f_globals["__name__"].startswith("meshwright"):  # where it looks at a model
            losses.append(float(self.detach()))
        BACKWARD(self, *args, **kwargs)

    torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]


def note_batches(batches: list[dict[str, torch.Tensor]]) -> None:
    """Add what the outermost module was called with in training, and the last target that a loss was computed for."""
    call, entropy, depth = torch.nn.Module.__call__, torch.nn.functional.cross_entropy, [0]

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not depth[0] and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            tensors = {str(place): value for place, value in enumerate(args)} | kwargs
            batches.append({n: v.detach().clone() for n, v in tensors.items() if isinstance(v, torch.Tensor)})
        depth[0] += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    def with_target(output: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if batches and not depth[0] and torch.is_grad_enabled():
            batches[-1]["target"] = target.detach().clone()
        return entropy(output, target, *args, **kwargs)

    def criterion(self: Any, output: Any, target: Any) -> Any:
        if batches and depth[0] == 1 and torch.is_grad_enabled():
            batches[-1]["target"] = target.detach().clone()
        return entropy(output, target)

    torch.nn.Module.__call__ = noted  # type: ignore[method-assign]
    torch.nn.functional.cross_entropy = with_target
    torch.nn.CrossEntropyLoss.forward = criterion  # type: ignore[method-assign]


def run_version(version: str, arguments: list[str], losses: list[float]) -> dict[str, Any]:
    """The losses of one version: a script, or a job as `job:NAME:STRATEGY`."""
    if version.startswith("job:"):
        from run_job import run_job

        torch.Tensor.backward = BACKWARD  # type: ignore[method-assign]  # tp knows PyTorch's own function
        _, name, strategy = version.split(":", 2)
        return run_job(name, strategy, Path(os.environ["NOTE_BATCHES"]))
    losses.clear()
    os.chdir(Path(version).parent)
    sys.argv = [version, *arguments]
    torch.manual_seed(0)
    runpy.run_path(version, run_name="__main__")
    return {"losses": list(losses)}


def main() -> None:
    out, folder, versions, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK")
    path = Path(out).absolute().with_suffix(f".{rank}.json" if rank is not None else ".json")
    torch.set_num_threads(1)
    with_stand_ins(Path(folder).absolute())
    on_cpu()
    losses: list[float] = []
    note_losses(losses)
    batches: list[dict[str, torch.Tensor]] = []
    notes = Path(os.environ["NOTE_BATCHES"])
    if not notes.exists():
        note_batches(batches)
    found: dict[str, Any] = {}
    for version in versions.split(";;"):
        name, _, what = version.partition("=>")
        try:
            found[name] = run_version(what, arguments, losses)
        except BaseException as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        path.write_text(json.dumps(found))
    if batches:
        torch.save(batches[: len(losses)], notes)
    os._exit(0)  # what a script left running must not keep the rank


if __name__ == "__main__":
    main()
