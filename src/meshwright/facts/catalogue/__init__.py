"""Catalogue of devices and their usual nodes, by name; `hardware_of` gives a cluster's numbers with their sources."""

from meshwright.facts.catalogue.lookup import (
    MEASURED,
    catalogue_name,
    catalogue_names,
    hardware_of,
    hardware_of_device,
    is_measured,
    name_of_gpu,
)

__all__ = [
    "MEASURED",
    "catalogue_name",
    "catalogue_names",
    "hardware_of",
    "hardware_of_device",
    "is_measured",
    "name_of_gpu",
]
