"""Pipeline schedules as data: they can be generated, printed, parsed and simulated without processes or torch."""

from __future__ import annotations

from meshwright.schedules.action import Action, Kind, Slot
from meshwright.schedules.completeness import check_complete
from meshwright.schedules.errors import ScheduleError
from meshwright.schedules.families import FAMILIES, Family
from meshwright.schedules.in_flight import InFlight, count_in_flight
from meshwright.schedules.make import make
from meshwright.schedules.micro_batch_rules import least_micro_batches, micro_batches_near, refuse
from meshwright.schedules.schedule import Placement, Schedule, ScheduleShape
from meshwright.schedules.simulate import Simulation, TimedAction, simulate

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
