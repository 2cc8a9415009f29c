"""One copy of the parameters in the compute dtype for all micro-batches of a step.

Casting a parameter where it is read costs two small kernels per parameter and micro-batch, and a pipeline would hold a
copy per micro-batch in flight. So a step first casts all parameters in few kernels, each block's into one buffer, and
modules read those copies. Gradients of a block's copies are cast together too, when the last of them is complete.

Copies exist only while a step or an evaluation runs: nobody can change a master behind them. (A model that changes its
own parameters in forward is refused under 16-bit dtypes.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.strategies.shares import mark_shares
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.foreach import foreach_copy_, unflatten
from meshwright.torch_private.modes import without_torch_function

LARGE = 1 << 20
"""Elements from which a parameter outside of blocks has a group of its own: a head's gradient should not wait for the
embedding's."""
ATTRIBUTE = "_low_copies"
"""The module's attribute that holds its `ReadCopies`."""
NO_COPY = (None, None)


class ReadCopies(dict[str, tuple[nn.Parameter, torch.Tensor]]):
    """The present copies of a module's own parameters, by name, each with the parameter that it is a copy of."""

    changes_are_seen = True
    """Recorded programs read parameters through the module, and so their copies."""

    def __init__(self, names: Sequence[str] = (), group: Any = None) -> None:
        """`names` are the parameters that are read as copies; copies of one `group` are made together."""
        super().__init__()
        self.names, self.group = tuple(names), group

    def __deepcopy__(self, memo: Any) -> ReadCopies:
        return ReadCopies()  # tensors of a graph cannot be copied, and the copied module casts where it reads

    def __reduce__(self) -> tuple[type[ReadCopies], tuple[()]]:
        return ReadCopies, ()


def parameters_as_read(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters by name, as copies while a step holds some."""
    copies = (read for each in module.modules() if (read := vars(each).get(ATTRIBUTE)) is not None)
    copy_of = {id(parameter): copy for read in copies for parameter, copy in read.values()}
    return {name: copy_of.get(id(parameter), parameter) for name, parameter in module.named_parameters()}


Place = tuple[ReadCopies, str, nn.Parameter]
"""Where a copy is read: the module's copies, the parameter's name in the module, and the parameter."""


class LowCopies:
    """The copies of a model's parameters, where `cast_parameters` made its modules read copies."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        groups: dict[Any, list[Place]] = {}
        for module in model.modules():
            read: ReadCopies | None = vars(module).get(ATTRIBUTE)
            for name in read.names if read is not None else ():
                parameter = module._parameters[name]
                assert read is not None and parameter is not None
                group = parameter if parameter.numel() >= LARGE and read.group is None else read.group
                groups.setdefault((group, parameter.device), []).append((read, name, parameter))
        self._groups, self._dtype = [Group(places) for places in groups.values()], dtype

    @contextmanager
    def shared(self, passes: int | None = None) -> Iterator[None]:
        """Hold copies of the masters as they are now; a group's are freed after this many backward passes."""
        self._lend(passes)
        try:
            yield
        finally:
            for group in self._groups:
                group.free()

    def _lend(self, passes: int | None) -> None:
        # Not in `shared`, whose variables would hold all copies until its end.
        with torch.no_grad():
            made = cast_lists([group.masters for group in self._groups], self._dtype)
        for group, copies in zip(self._groups, made, strict=True):
            group.lend(copies, passes)


class Group:
    """Copies in one buffer, whose gradients are cast together."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._left: int | None = None
        parameters = {id(parameter): parameter for _, _, parameter in places}.values()
        # Those of odd sizes come last, because kernels are slower on unaligned memory. Weights come before biases, so
        # that those of consecutive layers (query, key and value) can be read as one.
        self._trained = sorted(
            (p for p in parameters if p.requires_grad), key=lambda p: (p.numel() % 8 != 0, p.dim() < 2)
        )
        self._frozen = [p for p in parameters if not p.requires_grad]

    @property
    def masters(self) -> list[nn.Parameter]:
        return [*self._trained, *self._frozen]

    def lend(self, copies: list[torch.Tensor], passes: int | None) -> None:
        """Let modules read copies of the masters until so many backward passes have run or `free` is called."""
        self._left = passes
        linked = copies[: len(self._trained)]
        if self._trained and torch.is_grad_enabled():
            linked = [mark_shares(copy) for copy in _link(self, linked, *self._trained)]
        found = dict(zip(map(id, self._trained), linked, strict=True))
        found |= zip(map(id, self._frozen), copies[len(self._trained) :], strict=True)
        for read, name, parameter in self._places:
            read[name] = parameter, found[id(parameter)]

    def passed_backward(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.free()

    def free(self) -> None:
        for read, name, _ in self._places:
            read.pop(name, None)


class _Link(torch.autograd.Function):
    """Returns the copies as functions of the masters. Nothing is saved, so many backward passes may run through it."""

    @staticmethod
    def forward(ctx: Any, group: Group, copies: list[torch.Tensor], *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.dtypes = group, [master.dtype for master in masters]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.group.passed_backward()
        with without_torch_function():  # the mode for recomputing would look at every call
            dtypes, present = set(ctx.dtypes), [gradient for gradient in gradients if gradient is not None]
            if len(dtypes) == 1 and len(present) == len(gradients):
                return None, None, *cast_all(present, dtypes.pop())
            each = zip(gradients, ctx.dtypes, strict=True)
            return None, None, *(None if gradient is None else gradient.to(dtype) for gradient, dtype in each)


_link = direct_apply(_Link)


def cast_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors in another dtype; in one buffer by few kernels, if they are plain."""
    return cast_lists([tensors], dtype)[0]


def cast_lists(lists: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """`cast_all` for several lists: each has a buffer, and few kernels fill all of them."""
    found: list[list[torch.Tensor]] = []
    copied: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensors in lists:
        if not tensors or not _are_plain(tensors):
            found.append([tensor.to(dtype) for tensor in tensors])
            continue
        device = tensors[0].device
        buffer = torch.empty(sum([tensor.numel() for tensor in tensors]), dtype=dtype, device=device)
        found.append(list(unflatten(buffer, tensors)))
        targets, sources = copied.setdefault(device, ([], []))
        targets += found[-1]
        sources += tensors
    for targets, sources in copied.values():
        foreach_copy_(targets, sources)
    return found


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are dense, and no gradient of a gradient is wanted."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors)
