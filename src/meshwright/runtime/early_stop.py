"""Decide from evaluations whether a run ends early. Its state is kept in checkpoints."""

from __future__ import annotations

from typing import Any

from meshwright.facts.evaluation import EarlyStop

KEY = "early_stop"


class EarlyStopping:
    """Counts evaluations without an improvement, in the part of the run's state that checkpoints keep."""

    def __init__(self, rule: EarlyStop | None, kept: dict[str, Any]) -> None:
        self._rule, self._kept = rule, kept

    def saw(self, step: int, results: dict[str, float]) -> None:
        """Take an evaluation that counts. Its results are the same on all ranks, and so is what follows."""
        if self._rule is None:
            return
        value, state = results[self._rule.metric], self._state
        if self._rule.improves(value, state.get("best")):
            self._kept[KEY] = {"metric": self._rule.metric, "best": value, "best_step": step, "misses": 0}
        else:
            self._kept[KEY] = {"metric": self._rule.metric, "best": None, "best_step": None, **state}
            self._kept[KEY]["misses"] = state.get("misses", 0) + 1

    @property
    def is_over(self) -> bool:
        """Whether patience has run out."""
        return self._rule is not None and self._state.get("misses", 0) >= self._rule.patience

    @property
    def told(self) -> dict[str, Any] | None:
        """The best value and its step, if the rule ended the run."""
        return dict(self._state) if self.is_over else None

    @property
    def _state(self) -> dict[str, Any]:
        """Empty if the run was saved with a rule for another metric."""
        found = self._kept.get(KEY, {})
        return found if self._rule is not None and found.get("metric") == self._rule.metric else {}
