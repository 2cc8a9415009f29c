"""`pp=N:schedule`: pipeline parallelism, in which micro-batches keep the stages busy."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.facts.cluster import Cluster
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTraits
from meshwright.strategies.model_axis import StageAxis

COMPARED = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
"""The schedules that `compare` runs by default."""


class PipelineParallel(StageAxis):
    summary = "pipeline: consecutive layers on each rank, micro-batches in flight under a schedule"
    traits = AxisTraits(
        word="pp",
        mesh_name="pipeline",
        place=-20,
        conflict="both place the layers; pp also keeps the stages busy",
        suffixes=("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"),
        default_suffix="1f1b",
        suffix_name="schedule",
        staged=True,
        compiles=True,
        pieces_loss=True,
        engines=("torch", "deepspeed"),
        complexity=12,
        config_fields={"torchtitan": "pipeline_parallel_degree", "megatron": "pipeline-model-parallel-size"},
        missing={
            "accelerate": "Accelerate's config has no pipeline for training",
            "deepspeed": "DeepSpeed's pipeline is written in code, as a PipelineModule, and not in its config",
        },
    )

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        return range(2, len(facts.blocks) + 1)

    def compared(self, ranks: int) -> Iterator[str]:
        """Every schedule if the axis takes all ranks, else the default schedule."""
        for term in super().compared(ranks):
            schedules = COMPARED if term == f"pp={ranks}" else (self.traits.default_suffix,)
            yield from (f"{term}:{schedule}" for schedule in schedules)
