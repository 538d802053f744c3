"""A fault that a random schedule finds is found again from the folder that the schedule left."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from scheduler_service.core import states
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.states import SequenceState, Trigger
from tests.replay import replay
from tests.unit.scheduler import test_random_schedules
from tests.unit.scheduler.schedules import Schedule, schedules


def test_a_fault_of_the_core_fails_at_the_same_step_from_its_folder_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @settings(
        max_examples=100, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schedules())
    def find(schedule: Schedule) -> None:
        test_random_schedules.check(schedule)

    monkeypatch.setattr(test_random_schedules, "FOLDER", tmp_path)
    with monkeypatch.context() as planted:
        planted.delitem(states.TABLE, (SequenceState.RUNNING, Trigger.EVICT))
        with pytest.raises(IllegalEvent):
            find()
        (folder,) = tmp_path.iterdir()
        capsys.readouterr()
        assert replay(folder) == 1
    reported, now, journal = capsys.readouterr().out.splitlines()
    assert reported.removeprefix("reported").strip() == now.removeprefix("now").strip()
    assert "IllegalEvent: evict does not happen" in now
    assert "the same" in journal
    assert replay(folder) == 0
    assert "does not fail" in capsys.readouterr().out
