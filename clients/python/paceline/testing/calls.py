"""`ReceivedCall`: one call that a FakeScheduler got, and how it ended."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from google.protobuf.message import Message

from paceline.scheduler.v1 import scheduler_pb2 as pb

Outcome = Literal["running", "answered", "failed", "left"]
"""`failed`: with an error, as wanted or because it was aborted. `left`: the client cancelled, or its deadline
passed."""

_SLICE_S = 0.5  # a wait is cut into these, to notice that the interpreter ends


class ReceivedCall:
    """A call: its method, its message, the metadata and the deadline that came with it.

    `request` is the message; of GenerateUnary, the GenerateRequest in it. `deadline_s` is the time that the
    client gave, in seconds; None: no deadline. `prompt` is the text of the prompt: of a chat, the content of
    its last message. `request_id` is the client's, else a random one.
    """

    def __init__(
        self, method: str, request: Any, metadata: Mapping[str, str | bytes], deadline_s: float | None
    ) -> None:
        self.method, self.request = method, request
        self.request_id: str = getattr(request, "request_id", "") or uuid.uuid4().hex
        self.metadata, self.deadline_s = metadata, deadline_s
        self.prompt = prompt_of(request)
        self._outcome: Outcome = "running"
        self._changed = threading.Condition()
        self._aborted = False

    def __repr__(self) -> str:
        return f"<{self.method} {self.prompt!r}: {self.outcome}>"

    @property
    def outcome(self) -> Outcome:
        """How the call ended, or that it runs."""
        return self._outcome

    def wait(self, timeout_s: float = 10.0) -> Outcome:
        """Wait until the call has ended; how. Raises TimeoutError after `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._outcome != "running", timeout_s):
                raise TimeoutError(f"{self!r} after {timeout_s:g} s")
        return self._outcome

    @property
    def aborted(self) -> bool:
        """Whether Abort named this call."""
        return self._aborted

    def abort(self) -> bool:
        """Let the call end ABORTED; returns whether it was running."""
        with self._changed:
            running = self._outcome == "running"
            self._aborted |= running
            self._changed.notify_all()
        return running

    def end(self, outcome: Outcome) -> None:
        """Record how the call ended; the first to say so is right."""
        with self._changed:
            if self._outcome == "running":
                self._outcome = outcome
            self._changed.notify_all()

    def pause(self, seconds: float | None) -> bool:
        """Wait, without limit for None; returns whether the call still runs and was not aborted."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._outcome == "running" and not self._aborted:
                left_s = _SLICE_S if until is None else until - time.monotonic()
                if left_s <= 0:
                    return True
                if not threading.main_thread().is_alive():
                    return False
                self._changed.wait(min(left_s, _SLICE_S))
        return False


def prompt_of(request: Message) -> str:
    """The text of a request's prompt; of a chat the content of the last message, of token ids their bytes."""
    if isinstance(request, pb.GenerateRequest) and request.HasField("token_ids"):
        return text_of(request.token_ids.ids)
    if not isinstance(request, pb.GenerateRequest | pb.TokenizeRequest):
        return ""
    if request.HasField("messages"):
        return content_of(request.messages.messages[-1]) if request.messages.messages else ""
    return request.text


def content_of(message: pb.Message) -> str:
    """The text of one message of a chat."""
    return message.content or "".join(part.text for part in message.parts)


def text_of(token_ids: Any) -> str:
    """The text of token ids, which are bytes; others are left out, and what is not UTF-8 becomes U+FFFD."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")
