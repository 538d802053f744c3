"""The incidents of examples/drill.py, which docs/seeing.md walks through: `why` names the cause of each."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from paceline import aio
from paceline.types import RequestWait

from examples.drill import COMPLAINT, INCIDENTS, Incident
from tests.support.checkout import ROOT
from tests.support.stack import eventually

pytestmark = pytest.mark.long

FIRST, SECOND = COMPLAINT.format(1), COMPLAINT.format(2)
PAGES = {"pages", "pages_in_flight", "running_pages"}


def took_steps_of(one: RequestWait, least_ms: int) -> bool:
    """Its explanation says that steps take so long, at least."""
    told = re.search(r"Steps take (?:(\d+) ms|([\d.]+) s) each", one.explanation)
    return told is not None and (int(told[1]) if told[1] else 1000 * float(told[2])) >= least_ms


CAUSES: dict[str, Callable[[RequestWait], bool]] = {
    "pages": lambda one: one.first_reason in PAGES and one.needed > one.available,
    "account": lambda one: (
        one.reason == "own_earlier" and one.position > 5 and one.first_reason in ("seats", "other_turn")
    ),
    "executor": lambda one: one.phase == "running" and took_steps_of(one, 1000),
    "grammar": lambda one: one.reason == "grammar_compiling",
    "adapter": lambda one: one.reason == "adapter_slot" and "the only slot for adapters" in one.explanation,
}
"""What `why` says of the first request that somebody complains about."""
MENDED: dict[str, Callable[[RequestWait], bool]] = {
    "pages": lambda one: not PAGES & dict(one.queue_waits).keys(),
    "account": lambda one: 0 < one.position <= 5,
    "executor": lambda one: one.phase == "ended",
    "grammar": lambda one: one.phase == "ended",
    "adapter": lambda one: "adapter_slot" not in dict(one.queue_waits),
}
"""And once it is mended."""


@asynccontextmanager
async def happening(incident: Incident, directory: Path, *, mended: bool) -> AsyncIterator[aio.Client]:
    """A context manager: a client of an administrator, while requests are made."""
    with incident.service(directory, mended=mended) as service:
        async with service.aio_client() as client:
            traffic = asyncio.ensure_future(incident.happen(client, mended=mended))
            try:
                yield client
            finally:
                traffic.cancel()
                with suppress(asyncio.CancelledError):
                    await traffic


async def until_it_says(
    client: aio.Client, incident: Incident, request_id: str, named: Callable[[RequestWait], bool]
) -> None:
    """Ask why the request waits, until the answer is right."""
    said: list[RequestWait] = []

    async def is_named() -> bool:
        said[:] = (await client.why(request_id, identity=incident.who)).requests
        return bool(said) and named(said[0])

    await eventually(is_named, f"not named: {said}", timeout_s=120.0)


@pytest.mark.parametrize("name", INCIDENTS)
async def test_why_names_the_cause_of_an_incident(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    async with happening(incident, tmp_path, mended=False) as client:
        await until_it_says(client, incident, FIRST, CAUSES[name])
        if name == "account":  # which harms nobody else
            await client.view("alice").complete("hello", max_tokens=2)
            [still] = (await client.why(FIRST, identity=incident.who)).requests
            assert still.position > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_drill_that_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "drill.py"), "executor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as drill:
        assert drill.stdout is not None
        assert "complains" in drill.stdout.readline()
        assert "PACELINE_ADDRESS" in drill.stdout.readline()
        assert list(tmp_path.iterdir())
        drill.send_signal(number)
        assert drill.wait() == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", INCIDENTS)
async def test_what_mends_an_incident_does(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    async with happening(incident, tmp_path, mended=True) as client:
        request_id = SECOND if name == "grammar" else FIRST  # its first one compiles the grammar
        await until_it_says(client, incident, request_id, MENDED[name])
