"""The tokenizer process, short of memory when a prompt says so.

Tests set `text.launch.WORKER` to this module. At a prompt of the text ANSWER there is no memory for the
frame of its answer, at one of the text THREAD none for the thread in which its lane goes on. Prompts may
have 100 tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping
from typing import Any, NoReturn

from scheduler_service.text.worker import __main__ as module
from scheduler_service.text.worker.encoder import Encoder

ANSWER = "no memory for the answer"
THREAD = "no memory for a thread"
MAX_IDS = 100

worker: Any = module  # its names are replaced below


def main() -> None:
    """As the worker's, with the ailments."""
    encode_text = Encoder.encode_text
    encode_head = worker.encode_head
    niceness = worker.limits.niceness
    ailments = set[str]()

    def ailing_text(encoder: Encoder, text: str, *, begins: bool) -> array[int]:
        ailments.add(text)
        return encode_text(encoder, text, begins=begins)

    def ailing_head(header: Mapping[str, object], payload_bytes: int) -> bytes:
        if ANSWER in ailments:
            raise MemoryError
        return encode_head(header, payload_bytes)

    def ailing_niceness() -> int:
        if THREAD in ailments:
            threading.Thread.start = no_start  # type: ignore[assignment, method-assign]
            return niceness() + 1  # as if the scheduler had lowered the priority
        return niceness()

    def no_start(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    setattr(Encoder, "encode_text", ailing_text)  # noqa: B010  # not checked: its first argument has another name
    worker.encode_head = ailing_head
    worker.limits.niceness = ailing_niceness
    worker.MAX_IDS = MAX_IDS
    worker.main()


if __name__ == "__main__":
    main()
