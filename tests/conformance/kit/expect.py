"""Expectations that many checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from paceline.executor.v1 import executor_pb2 as pb
from tests.conformance.kit.client import Executor


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> grpc.StatusCode:
    """The code that a call is refused with; an answer is a failure, and so is a refusal without a word."""
    try:
        answer = call(*args, **kwargs)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        assert error.details(), "a refusal must say why"
        code: grpc.StatusCode = error.code()
        return code
    raise AssertionError(f"expected a refusal, got {answer!r}")


def balanced(executor: Executor) -> pb.CacheStatus:
    """The page ledger, checked: free + cached + owned = total."""
    cache = executor.status().cache
    assert cache.total_pages == executor.limits.total_pages
    held = cache.free_pages + cache.cached_pages + cache.owned_pages
    assert held == cache.total_pages, f"{held} pages accounted for of {cache.total_pages}"
    return cache


def pages(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)
