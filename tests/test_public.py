"""What is public is listed, sorted and there."""

import inspect
import re
import subprocess
import sys

import pytest

import meshwright
from meshwright import errors


def test_public_names_are_sorted_and_there() -> None:
    assert meshwright.__all__ == sorted(meshwright.__all__)
    for name in meshwright.__all__:
        found = getattr(meshwright, name)
        assert found.__module__.startswith("meshwright."), name
        assert found.__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = meshwright.nothing_of_the_kind


def test_a_job_file_costs_no_torch() -> None:
    """`from meshwright import Job` stays cheap: what needs torch is imported when it is asked for."""
    script = "import sys, meshwright; meshwright.Job, meshwright.Strategy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_tree_of_errors_is_drawn() -> None:
    """Each class that is defined stands in the docstring, below its parent."""
    defined = {
        name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
    }
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^([ │├└─]*)([A-Z]\w+)(\s{2,}|$)", line):
            drawn[found[2]] = len(found[1])
    assert drawn.keys() == defined.keys()
    above: list[str] = []
    for name, depth in drawn.items():
        above = [other for other in above if drawn[other] < depth]
        parent = above[-1] if above else "Exception"
        assert defined[name].__bases__[0].__name__ == parent, name
        above.append(name)


def test_every_error_has_an_exit_code_and_says_what_it_is() -> None:
    own = {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    for name, cls in own.items():
        assert cls.exit_code == (2 if issubclass(cls, errors.BadInput) else 1), name
        assert cls.__doc__, name
