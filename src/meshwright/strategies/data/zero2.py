"""`zero2`: like `zero1`, but each rank keeps only its part of the gradients."""

from __future__ import annotations

from dataclasses import replace

from meshwright.strategies.data.zero1 import Zero1


class Zero2(Zero1):
    summary = "ZeRO-2: the optimizer's state and the gradients are divided over ranks"
    traits = replace(Zero1.traits, word="zero2", shards=("gradients", "optimizer"), zero_stage=2, complexity=3)
