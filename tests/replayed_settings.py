"""A module of settings that the blocks of `test_tensor_replay_habits.py` import."""

SCALE = 1.0


def factor() -> float:
    return SCALE
