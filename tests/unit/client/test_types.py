"""The SDK's types have what the contract has."""

import dataclasses
from typing import Any

import pytest
from paceline import types
from paceline.requests import speculation
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (types.Usage, pb.Usage),
        (types.RequestLimits, pb.RequestLimits),
        (types.ModelInfo, pb.GetModelInfoResponse),
        (types.Status, pb.GetStatusResponse),
        (types.ExecutorStatus, admin_pb2.Executor),
    ],
)
def test_a_type_has_every_field_of_its_message(kind: Any, message: Any) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == {field.name for field in message.DESCRIPTOR.fields}


def test_each_drafter_of_the_contract_can_be_named() -> None:
    named = {speculation(types.Speculation(drafter=drafter)).drafter for drafter in types.Drafter}
    assert named == set(pb.Drafter.values()) - {pb.DRAFTER_UNSPECIFIED}
