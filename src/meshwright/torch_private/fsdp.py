"""FSDP2's reduction of gradients outside of a backward pass (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard


def reduce_gradients(module: FSDPModule) -> None:
    """Reduce the gradients that backward passes left whole, and keep parameters gathered.

    PyTorch's pipeline stage does so after the last micro-batch, but frees the parameters.
    """
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(True)
    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in _groups_of(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters that a module gathers; PyTorch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
