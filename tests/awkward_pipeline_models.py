"""Small models that do what stages can get wrong: they share, collect and change tensors, or choose by value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline_models import WIDTH, Block, Trunk


class Listening(Trunk):
    """A value crosses the cut that is read, but not learned through."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.enter(x))
        y = first
        for block in self.blocks[1:]:
            y = block(y)
        return self.leave(y + first.detach())


class Sharing(Trunk):
    """Blocks read a tensor off an object that they all know, and no argument hands it to them."""

    class Block(Block):
        def __init__(self, board: dict[str, Tensor]) -> None:
            super().__init__()
            self.board = board

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.board["scale"]

    def __init__(self) -> None:
        super().__init__(0)
        self.board: dict[str, Tensor] = {}
        self.blocks.extend(self.Block(self.board) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        self.board["scale"] = x.mean((1, 2), keepdim=True)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            self.board.clear()
        return self.leave(x)


class Collecting(Trunk):
    """What blocks return is written into parts of a table."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        table = x.new_zeros(len(self.blocks), *x.shape)
        for index, block in enumerate(self.blocks):
            x = block(x)
            table[index] = x
        return self.leave(table.sum(0))


class Routing(Trunk):
    """The first block chooses, in whole numbers, what the last layers do; a block behind it does not look at that."""

    class Block(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.argmax(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, chosen = self.blocks[0](self.enter(x))
        for block in self.blocks[1:]:
            x, _ = block(x)
        return self.leave(x + x.gather(-1, chosen) * (chosen > 2))


class Handing(Trunk):
    """A module returns its parameter as it is, and the model also reads it off the module."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.own = self.Own()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.own()
        for block in self.blocks:
            x = block(x)
        return self.leave(x * self.own.weight)


class Doubling(Trunk):
    """Blocks return one tensor in two places."""

    class Block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"output": y, "last": y}

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)["output" if index % 2 else "last"]
        return self.leave(x)


class Fickle(Trunk):
    """Calls one block less for a small batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for block in self.blocks if len(x) > 1 else self.blocks[:3]:
            y = block(y)
        return self.leave(y)


class ChangingGlue(Trunk):
    """Adds to a block's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.leave(x)


class ChangingFirst(Trunk):
    """Blocks change their input in place."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.tanh_())

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))


class ReadingChanged(ChangingFirst):
    """Goes on to read what its blocks have changed, and what it made of that before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            before = x * 2
            y = block(x)
            x = x + y + before
        return self.leave(x)


class ChangingPast(Trunk):
    """Changes outputs of blocks past autograd, and reads one of them after the next block."""

    def forward(self, x: Tensor) -> Tensor:
        y = last = self.enter(x)
        for block in self.blocks:
            y, last = block(y) + last, y
            y.data.add_(0.1)
            last.data[..., 0] = 1.0
        return self.leave(y + last)


class ChangingBatch(Trunk):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class ByValue(Trunk):
    """Looks at a value between its calls, and reads another one or not."""

    limit = float("inf")

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x + skip if x.sum() > self.limit else x)


class Selecting(Trunk):
    """Picks positions by values for its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.isfinite().all(-1)).nonzero(as_tuple=True)
        y = self.enter(x)[chosen]
        for block in self.blocks:
            y = block(y)
        return self.leave(y).view(*x.shape[:-1], -1)


class Averaging(Trunk):
    """Keeps an average of what lies between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        self.average = 0.9 * self.average + x.detach().mean((0, 1))
        return self.leave(x)


class AveragingBlocks(Trunk):
    """Keeps an average in the first block."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.average.lerp_(x.detach().mean((0, 1)), 0.1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.Block()
