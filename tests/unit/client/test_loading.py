"""Commands that wait for a model: what they take for a reason to wait, and what for the end."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from paceline import errors
from paceline.cli.loading import LoadingLines, wait_for_model


class Refusing:
    """A client whose scheduler, or router, refuses to say its status."""

    addresses = ("127.0.0.1:1",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def status(self, timeout_s: float) -> Any:
        raise errors.Unavailable("first: loading", code=grpc.StatusCode.UNAVAILABLE, reason=self._reason)


def test_that_the_first_of_several_models_is_loading_is_left_to_the_call_which_may_name_another() -> None:
    wait_for_model(cast(Any, Refusing("MODEL_LOADING")))


def test_where_nobody_listens_the_wait_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.loading.starting", list)
    with pytest.raises(errors.Unavailable):
        wait_for_model(cast(Any, Refusing("")))


def test_a_second_load_is_timed_from_its_own_beginning() -> None:
    shown: list[str] = []
    now = 0.0
    lines = LoadingLines(shown.append, lambda: now)
    for began in (0.0, 12.0):  # a model is put away and loaded again at once; another one loads all the while
        for second in range(6):
            now = began + second
            lines("a: starting" if second < 3 else "a: loading weights", second / 10)
            lines("b: loading weights", 0.0)
    a_load = ["a: starting ...", "a: loading weights ..."]
    assert [line for line in shown if line.startswith("a")] == a_load * 2
    assert [line for line in shown if line.startswith("b")] == [
        "b: loading weights ...",
        "b: loading weights ... 5 s",
        "b: loading weights ... 12 s",
        "b: loading weights ... 17 s",
    ]
