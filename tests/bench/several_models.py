"""Several models at one address: what it promises, and what its router costs.

usage: python -m tests.bench.several_models [mixed|faults|loading|hop ...] [--requests 2000] [--json FILE]

mixed    three small models and the default one in a bound that holds two of them: requests of the Python
         client, the Node client (`npm ci` in clients/node before) and the OpenAI API, each answer compared
         with that of its model alone, and the sum of PSS of all processes, sampled throughout
faults   SIGKILL and SIGSTOP of each process of one model, of router and gateway, a load, and one that fails,
         under streams of two models
loading  time to the first token of a warm model (an oracle) while the default model loads, and without
hop      streams of an oracle without step time through the router, and at its scheduler's own socket

Prints a line for each figure; exit status 1 if one is not within its bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import paceline
from service_kit.procfs import process_state

from tests.bench.figures import Line, report
from tests.model.default_model import default_model
from tests.support.memory import family, proportional_bytes
from tests.support.serve import Serve, serving

SMALL = {"first": 300, "second": 350, "third": 400}
"""The small models: oracles of these vocabularies."""
SMALL_KV, DEFAULT_KV = "700MiB", "128MiB"  # so that each model is planned to need about as much
MEMORY = 2_400_000_000  # holds two
TOKENS, PROMPTS, STREAMS = 8, 10, 4
PATIENCE_S = 600.0
LOADS = 2  # of the default model


def entries(names: Sequence[str], **more: object) -> list[dict[str, object]]:
    """Oracles as entries of a file of models."""
    settings = {"kv-memory": SMALL_KV, **more}
    return [
        {"name": name, "backend": "oracle", "executor": {"vocab-size": SMALL[name], **settings}}
        for name in names
    ]


@contextmanager
def serving_models(models: Sequence[Mapping[str, object]], *arguments: str) -> Iterator[Serve]:
    """A context manager: `paceline serve` with these models."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "models.yaml"
        path.write_text(json.dumps({"models": models}))  # JSON is YAML
        with serving(Path(directory), str(path), *arguments) as serve:
            yield serve


def default_entry() -> dict[str, object]:
    """The default model, loaded when it is asked for."""
    return {
        "name": "default",
        "backend": "torch",
        "model": str(default_model()),
        "executor": {"kv-memory": DEFAULT_KV},
        "on-demand": True,
    }


@dataclass
class Seen:
    """The answers of all clients, and what failed."""

    answers: list[tuple[str, str, str]] = field(default_factory=list)  # client and model, prompt, text
    failures: list[str] = field(default_factory=list)

    def ask(self, who: str, asked: Sequence[tuple[str, str]], answer: Callable[[str, str], str]) -> None:
        """Ask all in STREAMS threads."""

        def one(pair: tuple[str, str]) -> None:
            try:
                self.answers.append((pair[0], pair[1], answer(*pair)))
            except Exception as error:  # it is counted
                self.failures.append(f"{who}, {pair[0]}: {error!r}"[:300])

        with ThreadPoolExecutor(STREAMS) as threads:
            list(threads.map(one, asked))


def by_python(client: paceline.Client, model: str, prompt: str) -> str:
    """An answer, by the Python client."""
    return client.complete(prompt, model=model, max_tokens=TOKENS, temperature=0, ignore_eos=True).text


def by_door(door: str, model: str, prompt: str) -> str:
    """An answer, by the OpenAI API."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = Request(f"{door}/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def by_node(address: str, asked: Sequence[tuple[str, str]], seen: Seen) -> None:
    """All answers, by the Node client."""
    script = Path(__file__).with_name("several_models_node.mjs")
    done = subprocess.run(
        ["node", str(script), address, str(STREAMS), str(TOKENS)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if "error" in said:
            seen.failures.append(f"node, {said['model']}: {said['error']}"[:300])
        else:
            seen.answers.append((said["model"], said["prompt"], said["text"]))
    if done.returncode:
        seen.failures.append(done.stderr[-300:])


def mixed(requests: int) -> list[Line]:
    """0 failed, the same answers, memory within the bound."""
    models = [*entries([*SMALL]), default_entry()]
    prompts = [f"Tell me of the number {number}." for number in range(PROMPTS)]
    alone: dict[tuple[str, str], str] = {}
    for name in map(str, (one["name"] for one in models)):
        small = [f"-Evocab-size={SMALL[name]}"] if name in SMALL else []
        with (
            tempfile.TemporaryDirectory() as directory,
            serving(Path(directory), *small, backend="oracle" if small else "torch") as one,
            paceline.Client(one.address) as client,
        ):
            alone |= {(name, prompt): by_python(client, "", prompt) for prompt in prompts}
    chance = random.Random(5)
    names = [str(one["name"]) for one in models]
    asked: list[tuple[str, str]] = []
    while len(asked) < requests:  # in runs, as users do
        asked += [(chance.choice(names), chance.choice(prompts))] * chance.randint(1, 150)
    asked = [(name, chance.choice(prompts)) for name, _ in asked[:requests]]
    seen, done, most, held = Seen(), threading.Event(), [0], [0]
    began = time.monotonic()
    with (
        serving_models(models, "--memory", str(MEMORY), "--openai", "0") as serve,
        paceline.Client(serve.address, failover_timeout_s=PATIENCE_S) as client,
    ):
        (door,) = serve.wait_for(r"OpenAI API at ([^\s,]+)")

        def watch() -> None:
            while not done.is_set():
                most.append(proportional_bytes(serve.process.pid))
                held.append(
                    sum(state in ("loading", "serving", "draining") for state in client.models().values())
                )

        third = len(asked) // 3
        jobs = [
            threading.Thread(target=watch),
            threading.Thread(
                target=seen.ask,
                args=("python", asked[:third], lambda model, prompt: by_python(client, model, prompt)),
            ),
            threading.Thread(
                target=seen.ask,
                args=("door", asked[third : 2 * third], lambda model, prompt: by_door(door, model, prompt)),
            ),
            threading.Thread(target=by_node, args=(serve.address, asked[2 * third :], seen)),
        ]
        for job in jobs:
            job.start()
        for job in jobs[1:]:
            job.join()
        done.set()
        jobs[0].join()
    print(*sorted(set(seen.failures))[:10], sep="\n")
    other = sum(text != alone[model, prompt] for model, prompt, text in seen.answers)
    return [
        Line("mixed", "requests answered", len(seen.answers), least=requests),
        Line("mixed", "requests failed", len(seen.failures), most=0),
        Line("mixed", "answers other than the model's alone", other, most=0),
        Line("mixed", "most models held at once", max(held), most=2),
        Line("mixed", "largest sum of PSS, MB", max(most) / 1e6, most=MEMORY / 1e6),
        Line("mixed", "seconds", time.monotonic() - began),
    ]


@dataclass
class Paced:
    """A stream's tokens, and the longest time without one after the first."""

    ids: list[int] = field(default_factory=list)
    gap_s: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self, client: paceline.Client, model: str) -> None:
        """Read one to its end."""
        last = 0.0
        try:
            for event in client.generate("x", model=model, max_tokens=250, temperature=0, ignore_eos=True):
                if isinstance(event, paceline.Delta):
                    now = time.monotonic()
                    self.gap_s = max(self.gap_s, now - last) if last else 0.0
                    last = now
                    self.ids += event.token_ids
                    self.begun.set()
        except paceline.PacelineError as error:
            print(model, repr(error))
            self.begun.set()


VICTIMS = {
    "second's executor": f"vocab-size={SMALL['second']}",
    "second's scheduler": "--model-name=second",
    "second's tokenizer": "scheduler_service.text.worker",
    "router": "-m paceline_router",
    "gateway": "-m paceline_openai",
}
"""What is killed and stopped: processes by their command lines, of which the last one is second's."""


def faults() -> list[Line]:
    """Streams are the same whatever dies, freezes or can't be loaded, and another model's do not pause."""
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        file = shutil.copy(default_model(), directory)
        models = [
            *entries(["first", "second"], **{"step-ms": 20}),
            default_entry(),
            default_entry() | {"name": "deleted", "model": file},
        ]
        with (
            serving_models(models, "--openai", "0") as serve,
            paceline.Client(serve.address, failover_timeout_s=120) as client,
        ):
            calm = _beside(client, lambda: None)
            lines.append(Line("faults", "nothing: longest gap, s", max(one.gap_s for one in calm.values())))
            events: dict[str, Callable[[], None]] = {
                f"{number.name} of {victim}": partial(_strike, serve, victim, number)
                for number in (signal.SIGKILL, signal.SIGSTOP)
                for victim in VICTIMS
            }
            events["load of the default model"] = partial(client.load_model, "default")
            events["load of a deleted file"] = partial(_load_of_deleted, client, Path(file))
            for what, event in events.items():
                found = _beside(client, event)
                same = all(one.ids == calm[name].ids for name, one in found.items())
                own = "of second" in what
                lines += [
                    Line("faults", f"{what}: the same tokens", float(same), least=1),
                    Line("faults", f"{what}: first's longest gap, s", found["first"].gap_s, most=1),
                    Line("faults", f"{what}: second's, s", found["second"].gap_s, most=None if own else 1.0),
                ]
    return lines


def _beside(client: paceline.Client, event: Callable[[], None]) -> dict[str, Paced]:
    """Streams of two models, which have begun when the event happens."""
    found = {name: Paced() for name in ("first", "second")}
    threads = [threading.Thread(target=one.read, args=(client, name)) for name, one in found.items()]
    for thread in threads:
        thread.start()
    for one in found.values():
        one.begun.wait()
    event()
    for thread in threads:
        thread.join()
    return found


def _strike(serve: Serve, victim: str, number: signal.Signals) -> None:
    """Send a signal to a process of `VICTIMS`."""
    found = [one for one in family(serve.process.pid)[1:] if VICTIMS[victim] in _command(one)]
    os.kill(found[0 if victim == "router" else -1], number)  # the second router waits to take its place


def _load_of_deleted(client: paceline.Client, file: Path) -> None:
    """Load a model whose file is gone; that must fail with the file's name."""
    file.unlink()
    said = ""
    try:
        client.load_model("deleted")
    except paceline.PacelineError as error:
        said = str(error)
    assert file.name in said, said


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


def loading() -> list[Line]:
    """The first token of a warm model, while another one loads and while none does."""

    def first_tokens(client: paceline.Client, until: Callable[[], bool]) -> list[float]:
        found = []
        while not until():
            began = time.monotonic()
            client.complete("x", model="first", max_tokens=1)
            found.append((time.monotonic() - began) * 1000)
        return found

    with (
        serving_models([*entries(["first"]), default_entry()]) as serve,
        paceline.Client(serve.address) as client,
    ):
        alone, beside = list[float](), list[float]()
        for _ in range(LOADS):
            end = time.monotonic() + 5
            alone += first_tokens(client, lambda end=end: time.monotonic() > end)  # type: ignore[misc]
            load = threading.Thread(target=client.load_model, args=("default",))
            load.start()
            beside += first_tokens(client, lambda load=load: not load.is_alive())  # type: ignore[misc]
            client.unload_model("default")

    def percentile(found: list[float]) -> float:
        return sorted(found)[int(0.99 * (len(found) - 1))]

    return [
        Line("loading", f"first token alone, p99 of {len(alone)}, ms", percentile(alone)),
        Line("loading", f"first token while another loads, p99 of {len(beside)}, ms", percentile(beside)),
        Line("loading", "ratio", percentile(beside) / percentile(alone), most=2),
    ]


def hop() -> list[Line]:
    """What the router costs a token: of time, and of processor."""
    lines = []
    with serving_models(entries(["first", "second"])) as serve:
        pids = family(serve.process.pid)
        scheduler = next(one for one in pids if "--model-name=first" in _command(one))
        router = next(one for one in pids if "paceline_router" in _command(one))
        words = _command(scheduler).split()
        direct = f"unix:{words[words.index('--local-socket') + 1]}"
        for streams in (1, 32):
            rates: dict[str, list[float]] = {direct: [], serve.address: []}
            cpu_s = tokens = 0.0
            for _ in range(5):
                for address, found in rates.items():
                    with paceline.Client(address) as client, ThreadPoolExecutor(streams) as threads:
                        before, began = process_state(router), time.monotonic()
                        counts = list(threads.map(lambda _, client=client: _count(client), range(streams)))
                        found.append(sum(counts) / (time.monotonic() - began))
                        after = process_state(router)
                    if address == serve.address and before and after:
                        cpu_s, tokens = cpu_s + after.cpu_s - before.cpu_s, tokens + sum(counts)
            ratios = sorted(
                one / other for one, other in zip(rates[serve.address], rates[direct], strict=True)
            )
            lines += [
                Line("hop", f"{streams} streams: tokens/s at the scheduler", sorted(rates[direct])[2]),
                Line(
                    "hop", f"{streams} streams: tokens/s through the router", sorted(rates[serve.address])[2]
                ),
                Line("hop", f"{streams} streams: ratio, median of 5 pairs", ratios[2]),
                Line("hop", f"{streams} streams: router's processor a token, us", 1e6 * cpu_s / tokens),
            ]
    return lines


def _count(client: paceline.Client) -> int:
    answer = client.complete("x", model="first", max_tokens=400, temperature=0, ignore_eos=True)
    return len(answer.token_ids)


def main() -> int:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs: dict[str, Callable[[], list[Line]]] = {"faults": faults, "loading": loading, "hop": hop}
    parser.add_argument("scenarios", nargs="*", choices=["mixed", *runs, []], metavar="SCENARIO")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs["mixed"] = lambda: mixed(given.requests)
    return report([line for name in given.scenarios or runs for line in runs[name]()], given.json)


if __name__ == "__main__":
    sys.exit(main())
