"""Private PyTorch API that Meshwright relies on: names with a leading underscore, and names that no `__all__` lists.

Each file covers one theme and gives every such name a public one. `tests/torch_private/` tests each of them, so a
PyTorch release that changes one fails there first. Everything was seen in PyTorch 2.11 to 2.13 unless its docstring
says otherwise. Objects used in hot paths are re-exported rather than wrapped.

Not covered: `_parameters`, `_buffers` and `_modules` of `nn.Module`, which are widely relied on, and operator names
that are compared as strings.
"""
