"""Load the `Job` that a user names on the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from meshwright.errors import JobError, MeshwrightError, one_line
from meshwright.facts.job import Job
from meshwright.jobs.hugging_face import hugging_face_job
from meshwright.jobs.presets import preset_job


def load_job(text: str) -> Job:
    """The job of `file.py` (its variable `job`), `file.py:name`, `preset:NAME`, or `hf:` with a transformers config."""
    if text.startswith("preset:"):
        return preset_job(text.removeprefix("preset:"))
    if text.startswith("hf:"):
        return hugging_face_job(text.removeprefix("hf:"))
    path, _, name = text.partition(":") if not Path(text).exists() else (text, "", "")
    module = _load(Path(path))
    job = getattr(module, name or "job", None)
    if job is None:
        others = [key for key, value in vars(module).items() if isinstance(value, Job)]
        advice = f"it has {', '.join(others)}: write {path}:{others[0]}" if others else "write `job = Job(...)` in it"
        raise JobError(f"{path} has no variable {name or 'job'!r}; {advice}.")
    if not isinstance(job, Job):
        raise JobError(f"{path}:{name or 'job'} is {type(job).__name__}; it must be a meshwright.Job.")
    return job


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise JobError(f"There is no job file {path}; give the path of a Python file with a variable `job`.")
    spec = importlib.util.spec_from_file_location(f"meshwright_job_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file; a job is a file such as examples/gpt.py.")
    module = importlib.util.module_from_spec(spec)
    # In sys.modules, so that data-loading workers can unpickle what the file defines. Its folder goes on the path, so
    # that it can import its neighbours.
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{path} cannot be imported: {one_line(error)}") from error
    return module
