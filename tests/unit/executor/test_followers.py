"""A rank that was stopped is killed once it has work that it does not do, and so the executor ends."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from service_kit.procfs import process_state

from executor_service.backends.torch_backend.parallel import followers as module
from executor_service.backends.torch_backend.parallel.followers import Followers
from executor_service.backends.torch_backend.parallel.ranks import Rank
from tests.support.processes import stop

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process does")


class Ranks:
    """Two processes that wait for the end of their standard input, as followers do."""

    def __init__(self) -> None:
        self.lost: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        ranks = [Rank.on_this_machine(number, 3, 1) for number in (1, 2)]
        self.followers = Followers(command, ranks, lambda rank, status: self.lost.put((rank, status)))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "MAX_STILL_S", 0.01)
    ranks = Ranks()
    yield ranks
    ranks.followers.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released at each look at a process."""
    looks = threading.Semaphore(0)

    def counted(pid: int) -> object:
        state = process_state(pid)
        looks.release()
        return state

    monkeypatch.setattr(f"{module.__name__}.process_state", counted)
    return looks


@linux
def test_a_stopped_rank_with_work_is_lost(looks: threading.Semaphore, ranks: Ranks) -> None:
    stop(ranks.followers.pids[1])
    for _ in range(200):  # it has no work
        looks.acquire()
    assert ranks.lost.empty()
    with ranks.followers.working():
        assert ranks.lost.get(timeout=60) == (2, -signal.SIGKILL)


@linux
def test_work_that_a_call_began_is_work_after_its_end(looks: threading.Semaphore, ranks: Ranks) -> None:
    stop(ranks.followers.pids[0])
    for _ in range(200):
        looks.acquire()
    with ranks.followers.working():
        pass
    assert ranks.lost.get(timeout=60) == (1, -signal.SIGKILL)


@linux
def test_a_rank_that_waits_for_the_others_is_not_stopped(looks: threading.Semaphore, ranks: Ranks) -> None:
    with ranks.followers.working():
        for _ in range(200):
            looks.acquire()
    assert ranks.lost.empty()
