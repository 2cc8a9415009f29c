"""Plans in other frameworks' languages: DeepSpeed's, Accelerate's and torchtitan's configs, written and read."""

from __future__ import annotations

from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export import TARGETS, export
from meshwright.exchange.export_request import Exported, ExportRequest, Unsupported
from meshwright.exchange.imported import Imported
from meshwright.exchange.read import read_foreign

__all__ = ["TARGETS", "ExchangeError", "ExportRequest", "Exported", "Imported", "Unsupported", "export", "read_foreign"]
