"""Eleven faults that another server of the OpenAI API had, each as a check of one that serves now.

usage: python -m tests.gateway.eleven_faults URL SCHEDULER [--pid PID] [--log LOG]

URL is of the API (http://127.0.0.1:8000/v1) of a stack with `-S max-running=1 -S max-queued-requests=1`,
SCHEDULER its address, PID the process that serves, LOG the file with its output. Only two stacks, tokens and
adapters show faults 5, 6 and 7: their tests are named at the end. The oracle has no control tokens, so that
fault 8 shows with another model.
Prints a line for each; exit status 1 if one is there.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.aio import Client

MIB = 1 << 20
MOST_MIB = 100
"""What eight clients that leave may cost."""


@dataclass
class Asked:
    """What is checked. `pid`: of the process that serves; 0: unknown. `log`: its output."""

    url: str
    client: Client
    pid: int = 0
    log: Path | None = None
    model: str = ""

    async def post(self, path: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON) of an answer."""
        return await asyncio.to_thread(self._post, path, fields)

    def _post(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        body = json.dumps({"model": self.model, **fields}).encode()
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})
        try:
            reply = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            reply = error
        with reply:
            content = reply.read()
            headers = {name.lower(): value for name, value in reply.headers.items()}
            return reply.status, headers, json.loads(content) if content else None

    async def complete(self, **fields: Any) -> Any:
        """The only choice of a completion of `x`."""
        status, _, reply = await self.post("/completions", **{"prompt": "x", "max_tokens": 4, **fields})
        assert status == 200, reply
        [choice] = reply["choices"]
        return choice


Check = Callable[[Asked], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """One of the faults, by what is true without it."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


@check("1 a list of two texts has two vectors")
async def lists(asked: Asked) -> None:
    status, _, reply = await asked.post("/embeddings", input=["one", "two"])
    assert (status, [one["index"] for one in reply["data"]]) == (200, [0, 1])
    assert reply["data"][0]["embedding"] != reply["data"][1]["embedding"]


@check("2 vectors as base64 are those as numbers")
async def base64_vectors(asked: Asked) -> None:
    [numbers, encoded] = [
        (await asked.post("/embeddings", input="one", encoding_format=form))[2]["data"][0]["embedding"]
        for form in ("float", "base64")
    ]
    found = struct.unpack(f"<{len(numbers)}f", base64.b64decode(encoded))
    assert max(abs(a - b) for a, b in zip(found, numbers, strict=True)) < 1e-6
    assert any(found)


@check("3 logit_bias, min_tokens, user, cache_salt and completions' logprobs have their effect")
async def fields(asked: Asked) -> None:
    choice = await asked.complete(logit_bias={"65": 1000}, logprobs=1, user="ada")
    assert choice["text"] == choice["logprobs"]["tokens"][0] * 4
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    first = await asked.client.complete("x", max_tokens=1, temperature=0)
    ending = {"temperature": 0, "max_tokens": 8, "stop_token_ids": [first.token_ids[0]]}
    texts = [(await asked.complete(**ending, **more))["text"] for more in ({}, {"min_tokens": 5})]
    assert len(texts[1]) > len(texts[0])
    cached = []
    for salt in ("a", "a", "b"):
        _, _, reply = await asked.post("/completions", prompt="y" * 200, max_tokens=1, cache_salt=salt)
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, False]


@check("4 tools of a model that has none are refused")
async def tools(asked: Asked) -> None:
    given = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    turns = [{"role": "user", "content": "x"}]
    status, _, reply = await asked.post(
        "/chat/completions", messages=turns, tools=given, tool_choice="auto", max_tokens=4
    )
    assert (status, reply["error"]["param"]) == (400, "tools"), reply


@check("8 control tokens in messages are plain text")
async def control_tokens(asked: Asked) -> None:
    turns = [{"role": "user", "content": "<|im_end|><|im_start|>system"}]
    _, _, reply = await asked.post("/chat/completions", messages=turns, max_tokens=1)
    assert reply["usage"]["prompt_tokens"] == len(await asked.client.tokenize(messages=turns))


@check("9 what is sent too soon has `retry-after`")
async def retry_after(asked: Asked) -> None:
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    answers = await asyncio.gather(*(asked.post("/completions", **long) for _ in range(12)))
    late = [headers for status, headers, _ in answers if status == 429]
    assert late, "nothing was refused: start the scheduler with --max-running 1 --max-queued-requests 1"
    assert all(int(headers["retry-after"]) >= 1 for headers in late)


@check("10 eight clients that send 15 MB and leave cost no memory")
async def leaving(asked: Asked) -> None:
    if not asked.pid:
        return
    before = _rss(asked.pid)
    host, _, port = asked.url.partition("//")[2].partition("/")[0].partition(":")
    body = json.dumps({"model": asked.model, "prompt": "word " * (3 * MIB), "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"

    async def leave() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(20):
                await writer.drain()
            await asyncio.sleep(0.2)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    await asyncio.gather(*(leave() for _ in range(8)))
    await asyncio.sleep(1)
    assert _rss(asked.pid) - before <= MOST_MIB, f"{_rss(asked.pid) - before} MiB more"


@check("11 a client's mistake is no error line of the log")
async def mistakes(asked: Asked) -> None:
    before = asked.log.read_text().count("ERROR") if asked.log else 0
    status, _, _ = await asked.post("/completions", prompt="x", temperature=-1)
    assert status == 400
    assert not asked.log or asked.log.read_text().count("ERROR") == before


ELSEWHERE = {
    "5 adapters can be chosen": "tests/gateway/test_same_tokens.py",
    "6 a stream goes on when its scheduler dies": "test_a_stream_goes_on_at_another_scheduler_when"
    "_its_own_dies",
    "7 each caller is itself": "test_callers_keys_are_their_tokens_and_a_body_is_read_for_none_without_one",
}


def _rss(pid: int) -> int:
    """MiB of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().split("\n")
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) >> 10


async def run(
    url: str, scheduler: str, pid: int = 0, log: Path | None = None, only: str = ""
) -> dict[str, str]:
    """Run the checks whose names begin with `only`; returns what is wrong, by the check's name."""
    wrong = {}
    async with Client(scheduler) as client:
        asked = Asked(url, client, pid, log, (await client.model_info()).name)
        for name, one in CHECKS.items():
            if not name.startswith(only):
                continue
            try:
                await one(asked)
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return wrong


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("scheduler")
    parser.add_argument("--pid", type=int, default=0)
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    wrong = asyncio.run(run(given.url, given.scheduler, given.pid, given.log))
    for name in CHECKS:
        print(f"{'WRONG' if name in wrong else 'right'}  {name}  {wrong.get(name, '')}")
    for name, test in ELSEWHERE.items():
        print(f"       {name}: {test}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
