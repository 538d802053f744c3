"""The client process of `overload`: sends requests at Poisson times whatever becomes of them.

It shares the machine's cores with what it measures, so it computes little while a load lasts: requests are
made before, answers are not parsed, and the details of refusals are parsed afterwards.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

WARM_UP = 0.25
"""Of each load's time."""
HEALTH_INTERVAL_S = 0.02
STOP_ID = 5
MAX_TOKENS = 1024
MAX_ALONE, FIT = 0.25, 0.2
"""Of the shortest deadline, what a request may take that is alone; and what it is shortened to."""
MAX_WAIT_S = 10.0
"""For what has not ended when no more is sent."""


@dataclass
class Outcome:
    """One request; times in seconds since the load began, or since it was sent."""

    sent_at: float
    code: str
    took_s: float
    first_token_s: float | None = None
    details: bytes = b""  # google.rpc.Status of a refusal

    @property
    def retry_s(self) -> float | None:
        """What RetryInfo says."""
        retry = error_details_pb2.RetryInfo()
        for detail in status_pb2.Status.FromString(self.details).details:
            if detail.Unpack(retry):
                return float(retry.retry_delay.ToTimedelta().total_seconds())
        return None


@dataclass
class Row:
    """One load at one deadline; rates a second, times in ms."""

    deadline_s: float
    load: float
    offered: float
    goodput: float
    refused: float
    late: float  # ended DEADLINE_EXCEEDED
    in_vain: float  # of these, had tokens
    first_token_p50: float
    first_token_p99: float
    refusal_p50: float
    refusal_p99: float
    retry_ratio: float  # median of RetryInfo / the wait that was
    health_p99: float
    client_cpu: float  # of one core


class Client:
    """Sends requests of about `length` output tokens, of which the scheduler knows nothing.

    They have a cap far above, and end with a stop token that is masked until then and certain afterwards.
    """

    def __init__(self, address: str, length: int, spread: float, prompt: int, seed: int = 1) -> None:
        self._address, self._length, self._spread, self._prompt = address, length, spread, prompt
        self._random = random.Random(seed)
        self._stub: Any  # of asyncio
        self.lengths: list[int] = []

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(self._address)
        self._stub = SchedulerServiceStub(self._channel)
        self._generate: Any = self._channel.unary_stream("/paceline.scheduler.v1.SchedulerService/Generate")
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._vocabulary = min(256, (await self._stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def request(self) -> bytes:
        """The next request, encoded."""
        rng = self._random
        length = max(1, round(self._length * rng.lognormvariate(0, self._spread)))
        self.lengths.append(length)
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[rng.randrange(self._vocabulary) for _ in range(self._prompt)]),
            sampling=pb.SamplingParams(logit_bias={STOP_ID: 1000.0}),
            stop=pb.StopConditions(
                max_tokens=MAX_TOKENS, min_tokens=length - 1, token_ids=[STOP_ID], ignore_eos=True
            ),
            speculation=pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
        ).SerializeToString()

    async def call(self, request: bytes, began: float, timeout_s: float | None) -> Outcome:
        """One request to its end."""
        sent = time.monotonic()
        first: float | None = None
        call = self._generate(request, timeout=timeout_s)
        try:
            async for _ in call:
                first = first or time.monotonic() - sent
        except grpc.aio.AioRpcError as error:
            took_s, metadata = time.monotonic() - sent, error.trailing_metadata() or ()
            details: Any = next((value for key, value in metadata if key == "grpc-status-details-bin"), b"")
            return Outcome(sent - began, error.code().name, took_s, first, details)
        return Outcome(sent - began, "OK", time.monotonic() - sent, first)

    async def alone_s(self, times: int = 9) -> float:
        """Seconds that a request takes while there is no other: the median."""
        began = time.monotonic()
        outcomes = [await self.call(self.request(), began, None) for _ in range(times)]
        return statistics.median(one.took_s for one in outcomes)

    async def fit_length(self, shortest_deadline_s: float) -> float:
        """Shorten requests until one alone takes a quarter of the shortest deadline; what it takes then."""
        while (took_s := await self.alone_s()) > MAX_ALONE * shortest_deadline_s and self._length > 2:
            self._length = max(2, int(self._length * min(0.9, FIT * shortest_deadline_s / took_s)))
        self.lengths.clear()
        return took_s

    async def capacity(self, clients: int, seconds: float) -> float:
        """Requests a second that so many closed-loop clients get."""
        began, done = time.monotonic(), 0

        async def loop() -> None:
            nonlocal done
            while time.monotonic() - began < seconds:
                outcome = await self.call(self.request(), began, None)
                done += outcome.code == "OK" and seconds / 4 < time.monotonic() - began < seconds

        await asyncio.gather(*(loop() for _ in range(clients)))
        return done / (seconds * 0.75)

    async def ask_health(self, answers: list[float]) -> None:
        """Every 20 ms, until cancelled; how long each answer took, in seconds."""
        while True:
            sent = time.monotonic()
            await self._health.Check(health_pb2.HealthCheckRequest())
            answers.append(time.monotonic() - sent)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def offer(self, rate: float, timeout_s: float, seconds: float) -> list[Outcome]:
        """So many requests a second for so long, and how those ended that did, in MAX_WAIT_S after them."""
        due, planned = 0.0, []
        while (due := due + self._random.expovariate(rate)) < seconds:
            planned.append((due, self.request()))
        began, calls = time.monotonic(), []
        for due, request in planned:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            calls.append(asyncio.create_task(self.call(request, began, timeout_s)))
        ended, late = await asyncio.wait(calls, timeout=min(timeout_s, MAX_WAIT_S))
        for call in late:
            call.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._idle()
        return [call.result() for call in ended]

    async def _idle(self) -> None:
        """Wait until nothing runs or waits there."""
        while True:
            status = await self._stub.GetStatus(pb.GetStatusRequest())
            if not status.running and not status.waiting:
                return
            await asyncio.sleep(0.1)


def row(
    outcomes: list[Outcome],
    deadline_s: float,
    load: float,
    seconds: float,
    health: list[float],
    cpu: float,
) -> Row:
    """What the counted ones say. Goodput is by when requests ended, the rest by when they were sent."""
    start = WARM_UP * seconds
    span = seconds - start
    counted = [o for o in outcomes if o.sent_at >= start]
    good = [o for o in outcomes if o.code == "OK" and start <= o.sent_at + o.took_s < seconds]
    refused = [o for o in counted if o.code == "RESOURCE_EXHAUSTED"]
    late = [o for o in counted if o.code == "DEADLINE_EXCEEDED"]
    served = sorted((o.sent_at, o.first_token_s) for o in outcomes if o.first_token_s is not None)
    firsts = [o.first_token_s for o in counted if o.first_token_s is not None]
    ratios = []
    for one in refused:
        at = bisect_left(served, (one.sent_at, 0.0))
        if at < len(served) and (retry_s := one.retry_s) is not None:
            ratios.append(retry_s / served[at][1])
    return Row(
        deadline_s=deadline_s,
        load=load,
        offered=len(counted) / span,
        goodput=len(good) / span,
        refused=len(refused) / span,
        late=len(late) / span,
        in_vain=sum(o.first_token_s is not None for o in late) / span,
        first_token_p50=quantile(firsts, 0.5) * 1e3,
        first_token_p99=quantile(firsts, 0.99) * 1e3,
        refusal_p50=quantile([o.took_s for o in refused], 0.5) * 1e3,
        refusal_p99=quantile([o.took_s for o in refused], 0.99) * 1e3,
        retry_ratio=statistics.median(ratios) if ratios else 0.0,
        health_p99=quantile(health, 0.99) * 1e3,
        client_cpu=cpu,
    )


def quantile(values: list[float], share: float) -> float:
    """0 if there are no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
