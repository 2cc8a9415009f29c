"""The devices and ranks that a strategy can use here, as a `Place`."""

from __future__ import annotations

import os

import torch

from meshwright.assemble.device_placement import devices_for
from meshwright.assemble.world import World
from meshwright.environment import launched
from meshwright.errors import BadInput, Refused
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place


def choose_device(asked: str | None) -> str:
    """The device that the user named; otherwise `cuda` if there is a GPU, else `cpu`."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda was given, but PyTorch finds no GPU here; use --device cpu.")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def known_device(device: str | None) -> str | None:
    """Refuse a --device that is neither cpu nor cuda."""
    if device not in (None, "cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, not {device!r}.")
    return device


def count_ranks(asked: int | None, *, default: int) -> int:
    """The number of ranks: the launcher's, or --ranks. Refused if they differ."""
    place = launched()
    if place is None:
        return asked or default
    if asked is not None and asked != place.ranks:
        raise BadInput(f"--ranks {asked} was given, but the launcher started {place.ranks} ranks; leave it out.")
    return place.ranks


def place_for(device: str, ranks: int, *, local_ranks: int | None = None) -> Place:
    devices = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    return Place(device=device, devices=devices, ranks=ranks, local_ranks=ranks if local_ranks is None else local_ranks)


def find_place(device: str, ranks: int, strategy: Strategy | None = None, *, nodes: int = 1) -> Place:
    """The place of the launched ranks, of ranks that `nodes` will start, or of one process for all of the layers."""
    if strategy is not None and ranks == 1 and has_one_process_axis(strategy):
        return place_of_layers(device, strategy)
    place = launched()
    return place_for(device, ranks, local_ranks=place.local_ranks if place else ranks // nodes)


def fewest_ranks(strategy: Strategy, device: str) -> int:
    """The ranks that the strategy's sizes need; without --ranks, layers over GPUs run in one process."""
    if in_one_process(strategy) and strategy.data is None and device == "cuda":
        return 1
    return strategy.model_ranks * (strategy.data_size or 1)


def has_one_process_axis(strategy: Strategy) -> bool:
    """Whether one of its axes can use several devices of one process."""
    return any(term.traits.one_process for term in strategy.axes)


def in_one_process(strategy: Strategy) -> bool:
    """Whether it can run in one process, with one device per rank."""
    return bool(strategy.axes) and all(term.traits.one_process for term in strategy.axes) and not strategy.traits.sized


def place_of_layers(device: str, strategy: Strategy) -> Place:
    """One process with a device for each part of the layers; refused if it has too few devices."""
    if not in_one_process(strategy):
        raise Refused(f"{strategy} needs ranks; only layers alone run in one process, so give it --ranks.")
    devices_for(strategy.stage_ranks, torch.device(device, 0) if device == "cuda" else torch.device(device))
    return place_for(device, strategy.stage_ranks, local_ranks=1)


def place_of(world: World, strategy: Strategy | None = None) -> Place:
    """The place of a world. One process under `dp` or `layers` counts as one rank per device."""
    if strategy is not None and has_one_process_axis(strategy) and world.ranks == 1:
        return place_of_layers(world.device.type, strategy)
    if strategy is not None and strategy.traits.many_devices and world.ranks == 1:
        devices = torch.cuda.device_count() if world.device.type == "cuda" else 1
        return place_for(world.device.type, strategy.data_size or devices)
    return place_for(world.device.type, world.ranks, local_ranks=world.local_ranks)
