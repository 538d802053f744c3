"""Expectations that many checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> grpc.StatusCode:
    """The code that a call is refused with; an answer is a failure, and so is a refusal without a word."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return code_of(caught.value)


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed RPC, which must say why."""
    assert isinstance(error, grpc.Call)
    assert error.details(), "a refusal must say why"
    code: grpc.StatusCode = error.code()
    return code


def codes_of(executor: Executor, step: pb.Step, rows: int) -> list[grpc.StatusCode]:
    """Each row's code, where the contract lets the step be refused row by row or as a whole."""
    try:
        return [row.code for row in executor.step(step).rows]
    except grpc.RpcError as error:
        return [code_of(error)] * rows


def balanced(executor: Executor, status: pb.GetStatusResponse | None = None) -> pb.CacheStatus:
    """The page ledger, of `status` or of now, checked: free + cached + owned = total."""
    cache = (status or executor.status()).cache
    assert cache.total_pages == executor.limits.total_pages
    held = cache.free_pages + cache.cached_pages + cache.owned_pages
    assert held == cache.total_pages, f"{held} pages accounted for of {cache.total_pages}"
    return cache


def pages(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)
