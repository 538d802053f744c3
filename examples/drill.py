"""Five incidents for practice, on a service without a model; docs/seeing.md walks through them.

    python examples/drill.py pages              # or account, executor, grammar, adapter; until Ctrl-C
    python examples/drill.py pages --mended     # after the mend

Starts a scheduler and an executor, in whose settings or callers something is wrong, and makes requests. Those
that somebody complains about are `complaint-1`, `complaint-2` and so on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline import Delta, aio, errors
from paceline.testing import LiveConfig, LiveService

CALLERS = ("operator", "alice", "nightly")
"""Each one's token is its name. The first is an administrator."""
COMPLAINT = "complaint-{}"
ADAPTERS = ("poet", "clerk")
FORMS_S, MAX_CALLERS = 4.0, 200
"""The incident `grammar`: how long it takes to compile what is asked for at once; who asks at most."""
Options = Mapping[str, Any]
Traffic = Callable[[aio.Client], Awaitable[None]]


@dataclass(frozen=True)
class Incident:
    """Something that is wrong, who complains of what, and what mends it."""

    who: str
    complaint: str
    traffic: Traffic
    executor: Options = field(default_factory=dict)  # settings
    scheduler: Options = field(default_factory=dict)
    mended_traffic: Traffic | None = None  # None: the same
    mended_executor: Options = field(default_factory=dict)  # in place of those settings

    def service(self, directory: Path, *, mended: bool) -> LiveService:
        """The service, to be started. It needs files in this directory."""
        (directory / "tokens.yaml").write_text("".join(map(token_entry, CALLERS)))
        for name in ADAPTERS:
            write_adapter(directory / "adapters" / name)
        executor = {"adapter_dir": directory / "adapters", **self.executor}
        if mended:
            executor |= self.mended_executor
        scheduler = {"tokens_file": directory / "tokens.yaml", **self.scheduler}
        return LiveService(LiveConfig(executor=executor, scheduler=scheduler, token=CALLERS[0]))

    async def happen(self, client: aio.Client, *, mended: bool) -> None:
        """Make requests until this is cancelled."""
        await (self.mended_traffic or self.traffic if mended else self.traffic)(client)


def token_entry(name: str) -> str:
    """A caller's entry in a tokens file."""
    admin = str(name == CALLERS[0]).lower()
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'- {{name: "{name}", sha256: "{digest}", admin: {admin}}}\n'


def write_adapter(directory: Path) -> None:
    """A LoRA adapter of one layer, as PEFT writes them; its weights are its name."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    size = 4 * len(directory.name)
    data = directory.name.encode() * 4
    tensors: dict[str, object] = {}
    for at, (name, shape) in enumerate((("lora_A", (1, size // 4)), ("lora_B", (size // 4, 1)))):
        key = f"base_model.model.model.layers.0.self_attn.q_proj.{name}.weight"
        tensors[key] = {"dtype": "F32", "shape": shape, "data_offsets": (at * size, (at + 1) * size)}
    header = json.dumps(tensors).encode()
    content = len(header).to_bytes(8, "little") + header + data + data
    (directory / "adapter_model.safetensors").write_bytes(content)


async def stream(client: aio.Client, begun: asyncio.Event, text: str, **options: object) -> None:
    """One request after another; `begun` is set once the first has a token."""
    while True:
        with suppress(errors.PacelineError):
            async for event in client.generate(text, ignore_eos=True, **options):  # type: ignore[arg-type]
                if isinstance(event, Delta):
                    begun.set()


async def complain(client: aio.Client, text: str, **options: object) -> None:
    """The requests that somebody complains about, one after another."""
    for number in itertools.count(1):
        with suppress(errors.PacelineError):
            await client.complete(text, request_id=COMPLAINT.format(number), **options)  # type: ignore[arg-type]


async def long_prompts(client: aio.Client) -> None:
    """Two streams fill most pages, and then comes a third one's prompt."""
    alice, begun = client.view("alice"), [asyncio.Event(), asyncio.Event()]
    async with asyncio.TaskGroup() as tasks:
        for number, one in enumerate(begun):
            tasks.create_task(stream(alice, one, f"{number}" * 200, max_tokens=400))
        for one in begun:
            await one.wait()
        tasks.create_task(complain(alice, "c" * 200, max_tokens=20))


async def nightly_job(client: aio.Client, at_once: int) -> None:
    """A job sends so many requests at once, beside a caller who sends one at a time."""
    nightly, begun = client.view("nightly"), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(at_once):
            tasks.create_task(stream(nightly, begun, f"document {number}", max_tokens=80))
        await begun.wait()
        tasks.create_task(complain(nightly, "the last document", max_tokens=80))
        tasks.create_task(stream(client.view("alice"), asyncio.Event(), "hello", max_tokens=10))


async def one_story(client: aio.Client) -> None:
    """One stream after another."""
    await complain(client.view("alice"), "Tell me a story", max_tokens=100, ignore_eos=True)


async def forms(client: aio.Client, name: str) -> None:
    """Requests with a large schema, whose fields have this name, in which {} is the number of the request.

    There are so many at once that FORMS_S pass until all of their schemas are compiled, if all differ.
    """
    alice, numbers = client.view("alice"), itertools.count()

    async def ask(request_id: str, field_name: str) -> None:
        with suppress(errors.PacelineError):
            await alice.complete("Fill in", request_id=request_id, schema=form(field_name), max_tokens=4)

    async def ask_on(request_ids: str) -> None:
        for number in itertools.count(1):
            await ask(request_ids.format(number), name.format(next(numbers)))

    took_s = 0.0
    for number in range(3):  # the first ones start what compiles
        began = time.monotonic()
        await ask(f"first-{number}", f"field_of_first_{number}")
        took_s = time.monotonic() - began
    async with asyncio.TaskGroup() as tasks:
        for worker in range(min(MAX_CALLERS, round(FORMS_S / took_s))):
            tasks.create_task(ask_on(f"form-{worker}-{{}}"))
        tasks.create_task(ask_on(COMPLAINT))


def form(name: str) -> dict[str, Any]:
    """A schema of 400 fields, which takes a tenth of a second to compile, or a few."""
    pattern = {"type": "string", "pattern": "^[a-z]{1,40}(-[a-z0-9]{1,20}){0,8}$"}
    fields = {f"{name}_{number}": pattern for number in range(400)}
    return {"type": "object", "properties": fields, "required": [*fields]}


async def poems(client: aio.Client) -> None:
    """A stream of one adapter goes on and on, and another adapter is asked for."""
    for name in ADAPTERS:
        await client.load_adapter(name)
    alice, begun = client.view("alice"), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream(alice, begun, "An endless poem", model="poet", max_tokens=10_000))
        await begun.wait()
        tasks.create_task(complain(alice, "A short letter", model="clerk", max_tokens=20))


INCIDENTS = {
    "pages": Incident(
        *("alice", "a request hangs, and the service says that it serves", long_prompts),
        executor={"pages": 40, "step_ms": 50},
        mended_executor={"pages": 4000},
    ),
    "account": Incident(
        *("nightly", "the job's requests hang, those of others do not", partial(nightly_job, at_once=60)),
        executor={"step_ms": 50},
        scheduler={"max_running": 4},
        mended_traffic=partial(nightly_job, at_once=4),
    ),
    "executor": Incident(
        *("alice", "answers come letter by letter, a second apart", one_story),
        executor={"step_ms": 1000},
        mended_executor={"step_ms": 20},
    ),
    "grammar": Incident(
        *("alice", "requests with a schema begin after seconds", partial(forms, name="field_of_form_{}")),
        mended_traffic=partial(forms, name="field"),
    ),
    "adapter": Incident(
        *("alice", "requests to the adapter clerk hang, those to poet do not", poems),
        executor={"step_ms": 50, "adapter_slots": 1},
        mended_executor={"adapter_slots": 2},
    ),
}


async def practise(incident: Incident, *, mended: bool) -> None:
    """Let it happen until Ctrl-C, or SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with (
        tempfile.TemporaryDirectory() as directory,
        incident.service(Path(directory), mended=mended) as service,
    ):
        print(f"{incident.who} complains: {incident.complaint}.")
        print(f"export PACELINE_ADDRESS={service.address} PACELINE_TOKEN={CALLERS[0]}", flush=True)
        async with service.aio_client() as client:
            await incident.happen(client, mended=mended)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An incident for practice, until Ctrl-C.")
    parser.add_argument("incident", choices=INCIDENTS)
    parser.add_argument("--mended", action="store_true", help="with what mends it")
    arguments = parser.parse_args()
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(practise(INCIDENTS[arguments.incident], mended=arguments.mended))
