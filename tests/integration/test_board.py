"""Debian's Prometheus watches a served oracle: each query of the board and of the alerts finds series.

`make test-board` runs this, and prints what each query found.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline import aio, errors
from paceline.cli.token import entry

from scheduler_service.metrics.metrics import RENAMED
from tests.support.adapter_stack import write_adapters
from tests.support.ports import kept_port
from tests.support.serve import serving
from tests.unit.deploy.watching import RULES, Query, alert_queries, alerts, board_queries

pytestmark = pytest.mark.prometheus

TRAFFIC_S = 25.0
INTERVAL = "10s"
"""In place of $__rate_interval, with a scrape each second."""
SCHEMA = {
    "type": "object",
    "properties": {"a_name_that_is_forced": {"type": "boolean"}},
    "required": ["a_name_that_is_forced"],
}
SCARCE = (
    *("-S", "max-running=6", "-S", "max-queued-requests=8", "-S", "vllm-metric-names=true"),
    *("-E", "pages=60", "-E", "step-ms=4", "-D", "draft-agreement=0.7"),
)
"""So that requests wait for places and pages, are preempted and refused."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A served demo with a Prometheus that scrapes it."""

    address: str
    metrics: dict[str, str]  # URLs by service
    prometheus: str  # URL

    def ask(self, path: str, **parameters: object) -> Any:
        """What Prometheus answers."""
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def found(self, query: str) -> list[float]:
        """The finite values of all series of a query, in the last part of the traffic."""
        now = time.time()
        data = self.ask("query_range", query=query, start=now - TRAFFIC_S / 2, end=now, step=1)
        values = [float(value) for series in data["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]


@contextmanager
def prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """Debian's Prometheus on loopback, with the alert rules; its URL."""
    program = shutil.which("prometheus")
    assert program, "apt install prometheus"
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": targets}]}],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{kept_port()}"
    command = [
        *(program, f"--config.file={directory / 'prometheus.yaml'}", "--log.level=warn"),
        *(f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"),
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: answers(f"http://{address}/-/ready"), process)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """After traffic of each kind."""
    directory = tmp_path_factory.mktemp("demo")
    adapters, tokens = write_adapters(directory / "adapters", "ab"), directory / "tokens.yaml"
    tokens.write_text("".join(f"{entry(name, name)}\n" for name in ("loud", "calm")))
    ports = {"scheduler": kept_port(), "executor": kept_port()}
    flags = (
        *(*SCARCE, "-S", f"tokens-file={tokens}", "--adapter-dir", str(adapters), "-E", "adapter-slots=1"),
        *("--adapter", "a", "--adapter", "b", "--draft-backend", "oracle"),
        *("-S", f"metrics-port={ports['scheduler']}", "-E", f"metrics-port={ports['executor']}"),
    )
    targets = [f"127.0.0.1:{port}" for port in ports.values()]
    with serving(directory, *flags) as serve, prometheus(directory, targets) as url:
        metrics = {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}
        demo = Watched(serve.address, metrics, url)
        asyncio.run(traffic(demo.address))
        yield demo


async def traffic(address: str) -> None:
    """Everything that the board shows, for TRAFFIC_S seconds."""
    ends = time.monotonic() + TRAFFIC_S
    beginning = "Once upon a time there was a prompt that many requests had in common. " * 2

    async def again(client: aio.Client, number: int, **options: Any) -> None:
        at = 0
        while time.monotonic() < ends:
            at += 1
            text = f"{beginning}{number} {at % 3}"
            try:
                await client.completions(text, **options)
            except errors.PacelineError:
                await asyncio.sleep(0.1)

    async with aio.Client(address, failover_timeout_s=0) as client:
        loud, calm = client.view("loud"), client.view("calm")
        await asyncio.gather(
            *(again(loud, number, max_tokens=80, ignore_eos=True) for number in range(12)),
            *(again(calm, 20 + number, max_tokens=20) for number in range(2)),
            *(again(calm, 30, max_tokens=40, model=name, ignore_eos=True) for name in "ab"),
            again(calm, 40, max_tokens=40, schema=SCHEMA),
            again(calm, 50, max_tokens=20, n=2),
            again(calm, 60, max_tokens=20, top_p=3.0),  # which is refused
        )


@pytest.mark.parametrize("query", board_queries(), ids=lambda query: query.where)
def test_a_query_of_the_board_finds_values(watched: Watched, query: Query) -> None:
    found = watched.found(query.text.replace("$__rate_interval", INTERVAL))
    print(f"\n{query.where}: {len(found)} values, {min(found, default=0):.4g} to {max(found, default=0):.4g}")
    assert found, query.text


@pytest.mark.parametrize("query", alert_queries(), ids=lambda query: query.where)
def test_what_an_alert_reads_is_there(watched: Watched, query: Query) -> None:
    for name, condition in query.selectors:
        assert watched.found(name + condition), name + condition


def test_prometheus_takes_the_rules_and_finds_no_fault_in_evaluating_them(watched: Watched) -> None:
    rules = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {alert["alert"] for alert in alerts()}
    assert {rule["health"] for rule in rules} == {"ok"}


@pytest.mark.parametrize("service", ["scheduler", "executor"])
def test_promtool_finds_the_metrics_valid_but_for_vllms_colons_and_former_names(
    watched: Watched, service: str
) -> None:
    with urllib.request.urlopen(watched.metrics[service], timeout=30) as scrape:
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=scrape.read(), capture_output=True, check=False
        )
    complaints = {
        line
        for line in (checked.stdout + checked.stderr).decode().splitlines()
        if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))
    }
    former = {f"paceline_scheduler_{name}_total" for name in RENAMED} if service == "scheduler" else set()
    assert complaints == {f"{name} metric names should not contain abbreviated units" for name in former}
