"""What Meshwright takes from PyTorch without a promise: names that begin with an underscore or that no `__all__` lists.

Each file is one theme and gives such things a plain name; `tests/torch_private/` has a test for each, which fails when
PyTorch changes it. All of it is in PyTorch 2.11 to 2.13 unless its own line says otherwise. Names are handed on as they
are where they stand in a hot path, so that a detour costs nothing.

Not listed: `_parameters`, `_buffers` and `_modules` of a module, on which everybody relies, and names of operators that
are compared as text.
"""
