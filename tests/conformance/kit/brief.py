"""Sessions whose lease is so short that a machine standing still may end them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.conformance.kit.client import Executor
from tests.conformance.kit.expect import code_of

_LONGEST_S = 5.0  # nobody waits longer for a lease to run out
_ATTEMPTS = 10


class _StoodStill(Exception):
    """A request came later than the lease allows, so its refusal says nothing about the executor."""


class BriefSession:
    """A session with the shortest lease that the executor gives; skips the test if that is long."""

    def __init__(self, executor: Executor) -> None:
        self._renewed = time.monotonic()
        self.session = executor.open_session(lease_ms=1)
        self.lease_s = self.session.opened.lease_ms / 1000
        if self.lease_s > _LONGEST_S:
            self.session.close()
            pytest.skip(f"the shortest lease is {self.lease_s:g} s")

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Around a request that renews the lease: it must succeed if it comes within the lease."""
        sent = time.monotonic()
        try:
            yield
        except grpc.RpcError as error:
            late = time.monotonic() - self._renewed > self.lease_s
            if late and code_of(error) is grpc.StatusCode.NOT_FOUND:
                raise _StoodStill from error
            raise
        self._renewed = sent


def unless_it_stands_still(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of short leases again for as long as the machine, not the executor, ends them."""

    @functools.wraps(test)
    def again(**fixtures: Any) -> None:
        for _ in range(_ATTEMPTS):
            try:
                return test(**fixtures)
            except _StoodStill:
                continue
        pytest.skip("the machine stood still for longer than the lease, again and again")

    return again
