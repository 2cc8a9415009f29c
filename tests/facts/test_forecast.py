import copy
import json
import pickle

import pytest

from meshwright.facts.forecast import MEMORY_CAUSES, Forecast, Measurement

FORECAST = Forecast(memory={"optimizer": 300, "parameters": 100}, time={"compute": 0.5, "exposed": 0.25})


def test_sums() -> None:
    assert FORECAST.peak == 400
    assert FORECAST.step == 0.75
    assert Forecast().peak == 0
    assert Forecast().step == 0


def test_every_cause_is_taken_and_kept_in_order() -> None:
    full = Forecast(memory={cause: place for place, cause in enumerate(reversed(MEMORY_CAUSES))})
    assert tuple(full.memory) == MEMORY_CAUSES
    assert full.peak == sum(range(9))


def test_an_unknown_memory_cause_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'activation'.*activations"):
        Forecast(memory={"activation": 1})


def test_a_comparison_is_a_subtraction() -> None:
    measured = Measurement(memory={"parameters": 90, "allocator": 20}, time={"compute": 0.75})
    difference = measured - FORECAST
    assert difference.memory == {"parameters": -10, "optimizer": -300, "allocator": 20}
    assert difference.time == {"compute": 0.25, "exposed": -0.25}
    assert difference.peak == measured.peak - FORECAST.peak


def test_round_trips() -> None:
    assert Forecast.from_json(json.loads(json.dumps(FORECAST.to_json()))) == FORECAST
    assert pickle.loads(pickle.dumps(FORECAST)) == FORECAST
    assert copy.deepcopy(FORECAST) == FORECAST


def test_frozen_all_the_way_down() -> None:
    memory = {"parameters": 1}
    forecast = Forecast(memory=memory)
    memory["parameters"] = 2
    assert forecast.peak == 1
    with pytest.raises(TypeError):
        forecast.memory["parameters"] = 2  # type: ignore[index]
