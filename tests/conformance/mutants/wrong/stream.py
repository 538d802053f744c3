"""Errors on a stream: caught by test_stream.py."""

from __future__ import annotations

from typing import Any

from executor_service.contract.plan import Refusal, RequestRefused
from executor_service.rpc import servicer
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def refusal_ends_the_stream() -> None:
    """a step refused as a whole ends the stream it came on"""

    def encode_error(original: Any, refusal: Refusal, *index: int) -> Any:
        if not index:  # the whole step's, not a row's
            raise RequestRefused(refusal.reason, refusal.message)
        return original(refusal, *index)

    wrap(servicer, "encode_error", encode_error)


@mutant()
def stream_error_without_its_step() -> None:
    """a step that was refused on a stream is answered without its step id"""
    from paceline.executor.v1 import executor_pb2 as pb

    original = pb.StreamUnifiedDecodeResponse

    def response(**fields: Any) -> Any:
        return original()

    class Messages:
        StreamUnifiedDecodeResponse = staticmethod(response)

        def __getattr__(self, name: str) -> Any:
            return getattr(pb, name)

    setattr(servicer, "pb", Messages())  # noqa: B010  # mypy: an import is no attribute of its module
