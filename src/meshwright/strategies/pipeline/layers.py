"""`layers=N`: layer-wise placement of consecutive layers on each rank or device, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.facts.model_axis import AxisTraits
from meshwright.strategies.model_axis import StageAxis


class LayerPlacement(StageAxis):
    summary = "layer-wise placement: consecutive layers on each rank, or on each device of one process"
    traits = AxisTraits(
        word="layers",
        mesh_name="pipeline",
        place=-20,
        staged=True,
        compiles=True,
        pieces_loss=True,
        schedule="layers",
        one_process=True,
        complexity=12,
        missing={
            "torchtitan": "torchtitan has no layer-wise placement",
            "accelerate": "Accelerate has no layer-wise placement for training",
            "deepspeed": "DeepSpeed has no layer-wise placement",
            "megatron": "Megatron-LM has no layer-wise placement",
        },
    )

    def compared(self, ranks: int) -> Iterator[str]:
        yield f"layers={ranks}"
