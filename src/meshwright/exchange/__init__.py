"""Read and write the configs of DeepSpeed, Accelerate and torchtitan, and write launch files."""

from __future__ import annotations

from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export import TARGETS, export
from meshwright.exchange.export_request import Exported, ExportRequest, Unsupported
from meshwright.exchange.imported import Imported
from meshwright.exchange.read import read_foreign

__all__ = ["TARGETS", "ExchangeError", "ExportRequest", "Exported", "Imported", "Unsupported", "export", "read_foreign"]
