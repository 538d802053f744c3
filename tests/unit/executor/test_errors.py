"""Every reason has one status, and nothing but statuses leaves the process."""

from __future__ import annotations

import grpc

from executor_service.errors import CODE_OF, STATUS_OF
from executor_service.plan import Reason


def test_every_reason_has_a_status() -> None:
    assert set(STATUS_OF) == set(Reason)


def test_a_reason_is_named_as_its_status() -> None:
    for reason, status in STATUS_OF.items():
        assert reason.name == status.name
        assert CODE_OF[reason] == status.value[0]
    assert grpc.StatusCode.UNKNOWN not in STATUS_OF.values()
