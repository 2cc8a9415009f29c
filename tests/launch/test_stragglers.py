"""Which rank is said to be slow, from beats that are made up; and that waiting is told from working."""

import threading
import time

from meshwright.launch import stragglers
from meshwright.launch.heartbeat import STEPPING, Beat
from meshwright.launch.stragglers import StragglerWatch


def beat(at: float, step: int, waited: float) -> Beat:
    return Beat(doing=STEPPING, step=step, longest=1.0, at=at, thread=1, waited=waited)


def sentence(waited: list[float], *, seconds: float = 20.0, steps: int = 40) -> str:
    """About ranks that waited this long in a window of steps."""
    watch = StragglerWatch()
    assert watch.own_times({rank: beat(0.0, 2, 0.0) for rank in range(len(waited))}) == {}
    last = {rank: beat(seconds, 2 + steps, wait) for rank, wait in enumerate(waited)}
    return watch.tell(watch.own_times(last), {})


def test_a_rank_at_half_speed_is_named() -> None:
    told = sentence([10.0, 0.0, 10.0, 10.0])
    assert told.startswith("Rank 1 is slow: of each step it works 500 ms, the others 250 ms")


def test_ranks_that_are_equally_fast() -> None:
    assert sentence([3.0, 0.0, 4.0]) == ""


def test_a_small_part_of_a_step_is_not_told() -> None:
    """Steps of 500 ms in which ranks work 40 and 80 ms: they wait for something else."""
    assert sentence([18.4, 16.8]) == ""
    assert sentence([18.4, 12.0]).startswith("Rank 1 is slow")


def test_steps_too_short_to_measure() -> None:
    assert sentence([19.99, 19.9], steps=2000) == ""


def test_too_few_steps_say_nothing() -> None:
    assert sentence([10.0, 0.0], steps=3) == ""
    assert sentence([1.0, 0.0], seconds=2.0) == ""


def test_ranks_that_have_not_begun_or_have_all_finished() -> None:
    watch = StragglerWatch()
    assert watch.own_times({}) == {}
    assert watch.own_times({rank: beat(0.0, 2, 0.0) for rank in range(2)}) == {}
    assert watch.own_times({}) == {}
    assert watch.own_times({rank: beat(20.0, 42, 10.0) for rank in range(2)}) == {0: 0.25, 1: 0.25}


def test_a_rank_is_named_once_and_with_its_host() -> None:
    watch = StragglerWatch()
    assert "Rank 1 on host1 is slow" in watch.tell({0: 0.2, 1: 0.4}, {0: "host0", 1: "host1"})
    assert watch.tell({0: 0.2, 1: 0.4}, {}) == ""


def test_only_sleep_inside_a_collective_or_a_queue_of_loaders_is_waiting() -> None:
    def sleep_in(file: str) -> bool:
        code = compile("ready.set(); end.wait()", file, "exec")
        ready, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=exec, args=(code, {"ready": ready, "end": end}))
        thread.start()
        ready.wait()
        deadline = time.monotonic() + 2.0
        found = False
        while not found and time.monotonic() < deadline and file.startswith("/x/"):
            found = stragglers._waits(thread)
        found = found or stragglers._waits(thread)
        end.set()
        thread.join()
        return found

    assert sleep_in("/x/torch/distributed/distributed_c10d.py")
    assert sleep_in("/x/multiprocessing/queues.py")
    assert not sleep_in("/home/model.py")
