"""`python -m scheduler_service.text.worker MEMORY_MIB CPU_S`: reads jobs from a socket, writes answers to it.

Standard input is a socket to the scheduler that carries frames (`text.frames`) in both directions. The
process exits when the scheduler closes its end.

    at the start                                           ->  {threads}: a thread id of the system per lane
    {op: load, lane, chat_template, ...} + tokenizer.json  ->  {lane, chat, strip, ...} + lengths + pieces
    {op: text, lane, begins} + text                        ->  {lane} + token ids
    {op: chat, lane, max_bytes} + a chat as JSON           ->  {lane} + token ids
    {op: items, lane, max_bytes} + items as JSON           ->  {lane} + number of ids of each, then their ids
    {op: calls, lane, style, single} + tools as JSON       ->  {lane} + a grammar of calls
    {op: texts, lane} + tools as JSON                      ->  {lane} + arguments that may be texts, as JSON
    any of them that fails                                 ->  {lane, error, field}

Lane 0 is for small prompts and lane 1 for large ones, each with its own thread, so that a small prompt never
waits for a large one. The scheduler lowers
the priority of a thread whose job takes long. Raising it again takes privileges, so such a thread is replaced
after its job; the answer then has the new thread's id in `thread`.

Running out of memory ends the process with status EXIT_MEMORY, because it is unknown which lane used too
much. Any other failure of a thread ends the process too, so that no job is left without an answer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

from scheduler_service.chat.formats import MARKERS
from scheduler_service.text.frames import (
    EXIT_MEMORY,
    LANES,
    LARGE_NICENESS,
    PREFIX,
    Header,
    decode_header,
    encode_head,
    frame_lengths,
    pack_ints,
)
from scheduler_service.text.worker import limits
from scheduler_service.text.worker.chat_template import ChatTemplateError, RenderedTooLargeError
from scheduler_service.text.worker.encoder import Encoder, Files
from scheduler_service.text.worker.items import ItemError, encode_chat, item_ids
from scheduler_service.text.worker.sent_json import (
    SentJsonError,
    grammar_of_calls,
    parse_chat,
    texts_of_tools,
)

SWITCH_INTERVAL_S = 0.0005
"""Seconds for which one lane's thread may hold the interpreter lock while the other wants it."""
LARGE_BYTES = 256 << 10
"""Payload bytes above which freed memory is returned to the system after the job."""
MAX_ERROR_CHARACTERS = 500
MAX_IDS = 4 << 20
"""Token ids of a prompt: prompts have at most 3 MiB, and sound tokenizers make at most one token per byte."""


class TooManyTokensError(Exception):
    """A prompt has more than MAX_IDS tokens."""


class Worker:
    """Runs jobs from `connection`, each in the thread of its lane, and sends the answers."""

    def __init__(self, connection: socket.socket, cpu_s: float) -> None:
        self._connection = connection
        self._cpu_s = cpu_s
        self._writing = threading.Lock()
        self._lanes: list[SimpleQueue[tuple[Header, bytes]]] = [SimpleQueue() for _ in range(LANES)]
        self._successors: SimpleQueue[int] = SimpleQueue()
        self._threads: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(LANES)]
        self._encoder: Encoder | None = None

    def run(self) -> None:
        """Read jobs until the scheduler closes its end."""
        # A thread inherits its creator's priority. The lanes' threads may get a lower one, so a further
        # thread, whose priority never changes, creates them and their successors.
        _thread(self._start_threads).start()
        threads = [self._new_thread(lane) for lane in range(LANES)]
        with open(os.devnull, "wb") as nowhere:  # a panic of `tokenizers` may print the prompt
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
        self._send({"threads": threads}, b"")
        with self._connection.makefile("rb", buffering=1 << 16) as stream:
            while len(prefix := stream.read(PREFIX.size)) == PREFIX.size:
                head, payload = frame_lengths(prefix)
                header = decode_header(stream.read(head))
                self._lanes[header["lane"]].put((header, stream.read(payload)))

    def _send(self, header: Header, payload: bytes) -> None:
        head = encode_head(header, len(payload))
        with self._writing:
            self._connection.sendall(head)
            self._connection.sendall(payload)

    def _start_threads(self) -> NoReturn:
        """Start a thread for each lane number in `_successors`; put its id into the lane's `_threads`."""
        while True:
            lane = self._successors.get()
            thread = _thread(partial(self._work, lane))
            try:
                thread.start()
            except RuntimeError as error:  # no memory for its stack
                raise MemoryError from error
            self._threads[lane].put(thread.native_id or 0)

    def _new_thread(self, lane: int) -> int:
        """Start a thread for a lane; returns the operating system's id of it."""
        self._successors.put(lane)
        return self._threads[lane].get()

    def _work(self, lane: int) -> None:
        """Do the lane's jobs one after the other, until the scheduler lowers this thread's priority."""
        if lane:
            limits.lower_priority(LARGE_NICENESS)
        niceness = limits.niceness()
        is_lowered = False
        while not is_lowered:
            job, payload = self._lanes[lane].get()
            limits.extend_cpu(LANES * self._cpu_s)
            header, answer = self._answer(job, payload)
            is_lowered = limits.niceness() > niceness
            if is_lowered:
                header = header | {"thread": self._new_thread(lane)}
            self._send({"lane": lane} | header, answer)
            if len(payload) > LARGE_BYTES:
                del payload, answer
                limits.return_memory()

    def _answer(self, job: Header, payload: bytes) -> tuple[Header, bytes]:
        try:
            if job["op"] == "load":
                return self._load(job, payload)
            encoder = self._encoder
            assert encoder is not None
            match job["op"]:
                case "text":
                    return {}, _packed(encoder.encode_text(payload.decode(), begins=job["begins"]))
                case "calls":
                    added = encoder.added_tokens(MARKERS)
                    grammar = grammar_of_calls(
                        payload, job["style"], added, demanded=job["demanded"], max_calls=job["max_calls"]
                    )
                    return {}, grammar.encode()
                case "texts":
                    return {}, texts_of_tools(payload)
                case "items":
                    counts, ids = item_ids(encoder, payload, job["max_bytes"])
                    return {}, pack_ints(counts) + _packed(ids)
            return {}, _packed(chat_ids(encoder, payload, job["max_bytes"]))
        except RenderedTooLargeError:
            why, field = f"the template makes more than {job['max_bytes']} bytes of them", "messages"
        except TooManyTokensError:
            why, field = f"has more than {MAX_IDS} tokens", ""
        except (ChatTemplateError, SentJsonError, ItemError) as error:
            why, field = str(error), error.field
        except MemoryError:
            raise
        except BaseException as error:  # `tokenizers` raises Exception, and PanicException
            why, field = f"the tokenizer failed: {error or type(error).__name__}", ""
        why = why[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()  # it may contain surrogates
        return {"error": why, "field": field}, b""

    def _load(self, job: Header, payload: bytes) -> tuple[Header, bytes]:
        texts = {name: job[name] for name in ("chat_template", "bos_token", "eos_token", "add_bos")}
        self._encoder = encoder = Encoder(Files(payload, **texts))
        pieces = encoder.pieces
        header = {
            "chat": encoder.has_chat_template,
            "strip": pieces.strip,
            "special": list(pieces.special.items()),
            "count": len(pieces.lengths),
            "added": encoder.added_tokens(job["markers"]),
        }
        return header, pack_ints(pieces.lengths) + pieces.data


def chat_ids(encoder: Encoder, payload: bytes, max_bytes: int) -> array[int]:
    """Ids of a chat. Raises as Encoder.encode_messages, and SentJsonError."""
    return encode_chat(encoder, parse_chat(payload), max_bytes)


def _packed(ids: array[int]) -> bytes:
    """Raises TooManyTokensError."""
    if len(ids) > MAX_IDS:
        raise TooManyTokensError
    return pack_ints(ids)


def _thread(work: Callable[[], object]) -> threading.Thread:
    """A thread whose failure ends the process."""

    def run() -> None:
        try:
            work()
        except MemoryError:
            os._exit(EXIT_MEMORY)
        except BaseException:
            os._exit(1)

    return threading.Thread(target=run, daemon=True)


def main() -> NoReturn:
    """Set the limits, then run the worker."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    memory_mib, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole process group; the scheduler still drains
    limits.die_with_parent()
    limits.limit_memory(memory_mib)
    limits.lower_priority(limits.NICENESS)
    try:
        Worker(socket.socket(fileno=0), cpu_s).run()
    except MemoryError:
        os._exit(EXIT_MEMORY)
    finally:
        os._exit(0)  # does not wait for the lanes' threads


if __name__ == "__main__":
    main()
