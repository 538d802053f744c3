"""Kill the scheduler and the executor under four streams: `python examples/kill_nine.py`.

Starts `paceline serve` with the default model, asks four questions at once, and sends SIGKILL to the
scheduler once a quarter of the tokens are there, and to the executor at a half. The streams pause and go on.
Then the same questions are asked once more and nothing is killed: the answers are the same. `make recording`
draws what this prints as the picture in the documentation.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

from paceline import Client, Delta, aio, errors
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

QUESTIONS = (
    "Explain why the sky is blue.",
    "Process or thread: what is the difference?",
    "How do I make pancakes?",
    "Tell me about a robot who paints.",
)
PORT, TOKENS = 50071, 160
START_S = 120.0
PANEL = (48, 6)  # columns and lines of an answer
console = Console()


@dataclass
class Run:
    """Four answers as they grow, and what happened meanwhile."""

    began: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=lambda: [""] * len(QUESTIONS))
    events: list[str] = field(default_factory=list)
    tokens: int = 0
    longest_gap_s: float = 0.0
    last_token: float = field(default_factory=time.monotonic)
    grown: asyncio.Event = field(default_factory=asyncio.Event)  # set with each token

    def add(self, number: int, delta: Delta) -> None:
        """Take what came of an answer."""
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_token)
        self.last_token = now
        self.texts[number] += delta.text
        self.tokens += len(delta.token_ids)
        self.grown.set()

    def say(self, what: str) -> None:
        """Note an event with its time."""
        self.events.append(f"{time.monotonic() - self.began:5.1f} s  {what}")

    def __rich__(self) -> Group:
        width, lines = PANEL
        panels = []
        for question, text in zip(QUESTIONS, self.texts, strict=True):
            wrapped = Text(" ".join(text.split())).wrap(console, width - 4)[-lines:]
            panels.append(Panel(Text("\n").join(wrapped), title=question, width=width, height=lines + 2))
        paused_s = time.monotonic() - self.last_token
        state = Text(f"{time.monotonic() - self.began:5.1f} s  {self.tokens} tokens", "green")
        if paused_s > 0.3:
            state.append(f", paused for {paused_s:.1f} s", "yellow")
        return Group(Columns(panels), *(Text(event, "bold red") for event in self.events), state)


async def ask(client: aio.Client, run: Run) -> None:
    """All questions at once."""

    async def one(number: int) -> None:
        messages = [{"role": "user", "content": QUESTIONS[number]}]
        async with client.generate(messages=messages, max_tokens=TOKENS, temperature=0) as answer:
            async for event in answer:
                if isinstance(event, Delta):
                    run.add(number, event)

    await asyncio.gather(*map(one, range(len(QUESTIONS))))


async def kill(pid: int, name: str, run: Run, at: int) -> None:
    """SIGKILL to a process once there are `at` tokens."""
    while run.tokens < at:
        await run.grown.wait()
        run.grown.clear()
    os.kill(pid, signal.SIGKILL)
    run.say(f"kill -9 {pid}   # the {name}")


async def compared(serve: subprocess.Popen[bytes]) -> bool:
    """Whether the answers under kills are those of a run in which nothing is killed."""
    console.print("Four questions to a running [b]paceline serve[/], of which both processes are killed:\n")
    killed, quiet = Run(), Run()
    everything = TOKENS * len(QUESTIONS)
    async with aio.Client(f"127.0.0.1:{PORT}") as client:
        with Live(killed, console=console, refresh_per_second=6):
            await asyncio.gather(
                ask(client, killed),
                kill(pid_of(serve, "scheduler"), "scheduler", killed, everything // 4),
                kill(pid_of(serve, "executor"), "executor", killed, everything // 2),
            )
        console.print(
            f"\nNo stream failed. The longest pause was {killed.longest_gap_s:.1f} s.", highlight=False
        )
        await ask(client, quiet)
    same = killed.texts == quiet.texts
    console.print(f"The answers are [b]{'the same as' if same else 'NOT those of'}[/] without kills.")
    return same


def pid_of(serve: subprocess.Popen[bytes], service: str) -> int:
    """Of a service that `serve` has started; one that it is just starting has no such name yet."""
    command = ["pgrep", "-P", str(serve.pid), "-f", f"{service}_service"]
    while serve.poll() is None:
        if found := subprocess.run(command, capture_output=True, text=True, check=False).stdout.split():
            return int(found[0])
        time.sleep(0.01)
    raise SystemExit(f"paceline serve ended with status {serve.returncode}")


def wait_until_ready(serve: subprocess.Popen[bytes]) -> None:
    """Return when the model is loaded, for which the scheduler makes calls wait, once it listens itself."""
    with Client(f"127.0.0.1:{PORT}") as client:
        while serve.poll() is None:
            try:
                client.model_info(timeout_s=START_S)
                return
            except errors.Unavailable:
                time.sleep(0.1)
    raise SystemExit(f"paceline serve ended with status {serve.returncode}")


def main() -> int:
    """The exit status: 0 if the answers are the same."""
    command = [sys.executable, "-m", "paceline", "serve", "--port", str(PORT)]
    with tempfile.TemporaryFile("w+") as log:
        serve = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(serve)
            return 0 if asyncio.run(compared(serve)) else 1
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait()


if __name__ == "__main__":
    sys.exit(main())
