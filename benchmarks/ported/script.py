"""What the benchmark knows of a public script: where it is, how it is made small, and its ports as edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edits import Edit

Edits = Mapping[str, Sequence[Edit]]
"""By file."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A public training script."""

    name: str
    repository: str
    """As "owner+name", the folder of a bare clone."""
    folder: str
    """The script's folder in the repository."""
    main: str
    files: Sequence[str]
    """Files and folders besides `main`, relative to `folder`."""
    arguments: Sequence[str] = ()
    library: str = ""
    """A folder of the repository that is itself imported, besides the script."""
    setting: Edits = field(default_factory=dict)
    """Makes it small; in all versions, and not counted."""
    plain: Edits = field(default_factory=dict)
    """From a script for Accelerate to plain PyTorch, from which both ports are counted; empty if it is plain."""
    accelerate: Edits = field(default_factory=dict)
    """The port to Accelerate; empty if the script is written for it."""
    own_loop: Callable[[str], Edits]
    """The port to `mw.parallelize`, by strategy."""
    as_ranks: bool = False
    """Whether it needs torchrun's variables in one process, too."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Writes made-up data into the script's folder."""
