"""`optimizer.state_dict()` in a user's loop: it holds what this rank has, and must return to the same rank."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.recording.dtensor import is_dtensor
from meshwright.runtime.own_loop import OwnLoop

KEY = "meshwright"
"""The entry of a state that names the rank it belongs to."""


def sign_states(optimizer: Optimizer, loop: OwnLoop) -> None:
    """Make the optimizer's states name their rank if they are of parts, and refuse any other rank's."""
    axes = loop.axes
    if not (axes.inner or axes.stages is not None or any(map(is_dtensor, loop.optimized))):
        return
    if optimizer.state:
        raise CheckpointError(
            f"{type(optimizer).__name__} has state already when mw.parallelize gets to know it, which need not be of "
            f"this rank's parts under {loop.strategy}; give the optimizer to mw.parallelize(optimizer=...) first."
        )
    own = f"rank {loop.world.rank} of {loop.world.ranks} under {loop.strategy}"

    def sign(_: Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = own

    def refuse_others(_: Optimizer, state: dict[str, Any]) -> None:
        other = state["state"] and state.get(KEY) != own
        told = f"{own} was given the state of {state.get(KEY, 'whole parameters')}" if other else ""
        if found := [one for one in loop.world.gather(told) if one]:
            raise CheckpointError(
                f"optimizer.load_state_dict on {found[0]}, but it has other parts. Save and load with "
                "model.save(folder) and model.load(folder), which work on any number of ranks; `meshwright checkpoint "
                "import` reads other frameworks' files."
            )

    optimizer.register_state_dict_post_hook(sign)
    optimizer.register_load_state_dict_pre_hook(refuse_others)
