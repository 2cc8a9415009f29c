"""A stand-in for setuptools' module of this name, which no longer exists."""

import packaging
import packaging.version

__all__ = ["packaging"]
