"""Pipeline schedules as data: they can be generated, printed, parsed and simulated without processes or torch."""

from __future__ import annotations

from meshwright.schedules.action import Action, Kind, ScheduleError, Slot
from meshwright.schedules.families import FAMILIES, Family
from meshwright.schedules.make import least_micro_batches, make, micro_batches_near, refuse
from meshwright.schedules.schedule import Placement, Schedule, ScheduleShape, check_complete
from meshwright.schedules.simulate import InFlight, Simulation, TimedAction, count_in_flight, simulate

__all__ = [
    "FAMILIES",
    "Action",
    "Family",
    "InFlight",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "ScheduleShape",
    "Simulation",
    "Slot",
    "TimedAction",
    "check_complete",
    "count_in_flight",
    "least_micro_batches",
    "make",
    "micro_batches_near",
    "refuse",
    "simulate",
]
