"""Find the line of an author's code that is running, for messages."""

from __future__ import annotations

import inspect
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_PACKAGES = sysconfig.get_path("purelib")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)
_PYTHON = (sysconfig.get_path("stdlib"), "<")


@dataclass(frozen=True)
class CodeLine:
    """A line of a model's code, or of the job's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"line {self.line} of {self._short}, in {self.function}"

    @property
    def _short(self) -> str:
        """The path inside an installed package, else the file's name."""
        if self.file.startswith(_PACKAGES):
            return str(Path(self.file).relative_to(_PACKAGES))
        return Path(self.file).name


def running_line() -> CodeLine | None:
    """The innermost running line that is neither PyTorch's, Python's nor ours; None in a backward pass."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_AUTOGRAD):
        if is_authors(frame.f_code.co_filename):
            return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back
    return None


def running_module() -> nn.Module | None:
    """The innermost running module, by the `self` of running methods."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return module
        frame = frame.f_back
    return None


def failed_line(error: BaseException) -> CodeLine | None:
    """The innermost such line in an error's traceback."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if is_authors(code.co_filename):
            found = CodeLine(code.co_filename, step.tb_lineno, code.co_qualname)
        step = step.tb_next
    return found


def is_authors(file: str) -> bool:
    """Whether a file is neither PyTorch's, Python's nor ours."""
    if file.startswith(_LIBRARIES):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_PYTHON)  # packages may be inside Python's folder
