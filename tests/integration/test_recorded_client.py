"""A client that was built from the frozen v1 is still understood, byte by byte.

`recorded/v1.json` has what such a client sent, and what it got. The same bytes are sent to the services of
today, and their answers are read with the frozen image: fields that came later are unknown to that client.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.integration.recorded.wire import EXECUTOR, Call, methods, read, recorded, send
from tests.support.stack import oracle_stack

SNAPSHOTS = ("GetInfo", "GetStatus", "GetModelInfo", "GetTokenizer", "ListExecutors", "Warmup")
"""What they tell may change with the implementation: fields that were told are told still."""

NONE_NOW = {("GetStatus", ".cachedTokens")}
"""A zero can't be told from a missing field. Forks of a prompt no longer count as found in the cache."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Call, Call]]]:
    """Each recorded call, and the same made now; in their order, since they share caches."""
    with oracle_stack(tmp_path_factory.mktemp("stack"), executor=EXECUTOR) as stack:
        addresses = {"executor": stack.addresses[0], "scheduler": stack.scheduler.address}
        channels = {name: grpc.insecure_channel(address) for name, address in addresses.items()}
        yield [
            (call, send(channels[call.service], call.service, call.method, call.request))
            for call in recorded()
        ]
        for channel in channels.values():
            channel.close()


def test_each_method_of_v1_was_recorded() -> None:
    assert set(methods()) <= {call.method for call in recorded()}


def test_a_recorded_call_of_v1_gets_its_recorded_answer(answers: list[tuple[Call, Call]]) -> None:
    for then, now in answers:
        assert now.code == then.code, then.method
        before, after = read(then.method, then.replies), read(now.method, now.replies)
        name = then.method.rpartition("/")[2]
        if name in SNAPSHOTS:
            assert len(after) == len(before), then.method
            for old, new in zip(before, after, strict=True):
                lost = fields(old) - fields(new)
                assert {(name, field) for field in lost} <= NONE_NOW, then.method
        else:
            assert after == before, then.method


def fields(value: object, path: str = "") -> set[str]:
    """Paths of all fields that are set."""
    if not isinstance(value, dict):
        return {path}
    return {path}.union(*(fields(part, f"{path}.{name}") for name, part in value.items()))
