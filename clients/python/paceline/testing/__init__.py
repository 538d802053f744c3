"""For tests of programs that call Paceline: a scheduler that answers as the test says, and a live service.

`FakeScheduler` answers in this process, at once, slowly or with any error. `LiveService` runs a scheduler and
an executor without a model as processes. pytest has both as fixtures, whose names begin with `paceline_`:
see `pytest_paceline` and docs/testing.md.
"""

from paceline.testing.calls import ReceivedCall
from paceline.testing.fake_scheduler import FakeScheduler
from paceline.testing.live_config import LiveConfig
from paceline.testing.live_service import LiveService, LiveServiceError
from paceline.testing.replies import FakeError, FakeLoss, FakeReply, FakeStall

__all__ = [
    "FakeError",
    "FakeLoss",
    "FakeReply",
    "FakeScheduler",
    "FakeStall",
    "LiveConfig",
    "LiveService",
    "LiveServiceError",
    "ReceivedCall",
]
