"""Output whose reader may leave or stand still."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
from paceline.cli.log_writer import MAX_QUEUED, LogWriter, never_blocking
from rich.console import Console


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def writer_to(descriptor: int) -> LogWriter:
    with open(os.devnull) as like:
        return LogWriter(descriptor, like)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    writer = writer_to(pipe[1])
    for number in range(100):
        writer.write(f"{number}\n")
    writer.finish(60)
    assert os.read(pipe[0], 10_000).decode() == "".join(f"{number}\n" for number in range(100))
    writer.close()


def test_a_reader_that_has_left_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = writer_to(pipe[1])
    for _ in range(10):
        writer.write("nobody reads this\n")
    writer.finish(60)
    assert writer.idle
    writer.close()


def test_a_full_disk_is_no_error() -> None:
    with open("/dev/full", "w") as full:
        writer = LogWriter(full.fileno(), full)
        writer.write("no room for this\n")
        writer.finish(60)
        assert writer.idle
        writer.close()


def test_a_reader_that_stands_still_stops_nobody_and_learns_what_it_missed(pipe: tuple[int, int]) -> None:
    writer = writer_to(pipe[1])
    piece = "x" * 1023 + "\n"
    many = MAX_QUEUED + 1000
    for _ in range(many):  # far more than a pipe holds: a write that waits would wait for ever
        writer.write(piece)
    heard: list[bytes] = []

    def read() -> None:
        while data := os.read(pipe[0], 1 << 16):
            heard.append(data)

    reading = threading.Thread(target=read)
    reading.start()
    writer.finish(60)
    assert writer.idle
    writer.close()
    os.close(pipe[1])
    reading.join(60)
    lines = b"".join(heard).decode().splitlines()
    said = [line for line in lines if "dropped" in line]  # once for each time that there was room again
    dropped = sum(int(line.split()[0].strip("[")) for line in said)
    assert dropped > 0
    assert len(lines) - len(said) + dropped == many


def test_a_console_prints_through_it_and_is_itself_again_afterwards(pipe: tuple[int, int]) -> None:
    with open(pipe[1], "w", closefd=False) as file:
        console = Console(file=file)
        with never_blocking(console):
            console.print("through the thread")
            assert console.file is not file
        assert os.read(pipe[0], 100) == b"through the thread\n"
        assert console.file is file
