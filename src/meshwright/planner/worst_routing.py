"""Forecast a plan for the worst routing: all tokens choose experts of one rank. Forecasts are for balanced routing."""

from __future__ import annotations

from dataclasses import replace

from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.planner.search import PlanContext, consider


def with_worst_routing(context: PlanContext, plan: Plan) -> Plan:
    """The plan with its forecast for the worst routing, if the model routes tokens to experts.

    Memory is that of the plan, which may have been traced, and what the worst case adds in closed form.
    """
    if not context.facts.experts:
        return plan
    crowded = replace(context, stage_costs=context.stage_costs.at_worst())
    worst, even = (consider(one, plan.strategy).forecast for one in (crowded, context))
    added, memory = (worst - even).memory, plan.forecast.memory
    causes = {cause: memory.get(cause, 0) + added.get(cause, 0) for cause in {**memory, **added}}
    return replace(plan, worst=Forecast(memory=causes, time=worst.time))
