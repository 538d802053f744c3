"""The picture of `paceline timeline`: figures of the steps, and a bar for each stream."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.cli.rows import counted
from paceline.steps import RequestEvent, Step

MAX_STREAMS = 8192
"""Streams that are remembered; of more, the oldest are forgotten."""
_ARRIVES = ("callers_turn", "tokenizing", "grammar_compiling")
"""What it waited for before it was queued."""
_BEGINS = {"queued": "waits", "preempted": "again", "admitted": "runs", "resumed": "runs"}
_MARKS = {
    "arrives": ("·", "cyan"),
    "waits": ("░", "yellow"),
    "again": ("▒", "red"),
    "runs": ("█", "green"),
    "": (" ", ""),
}
_ASCII = {"arrives": "-", "waits": ".", "again": "x", "runs": "#", "": " "}
_LEVELS, _ASCII_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_KEY = {"arrives": "arrives", "waits": "waits", "runs": "runs", "again": "preempted"}
_NAME_WIDTH, _SPARK_WIDTH = 20, 24
_OF_STEPS = ("steps", "tokens")
"""Figures that are nothing between two steps; the others stay as they were."""
_LEAST_NAME = 8
"""Characters of an id that are shown at least."""
_CUT, _ASCII_CUT = "…", ".."


@dataclass(slots=True)
class _Row:
    """One completion: what it does from when on, in microseconds since 1970; "": it has ended."""

    identity: str
    name: str
    spans: list[tuple[int, str]] = field(default_factory=list)

    def label(self, width: int, cut: str) -> str:
        """Whose it is, and which: of what is too long the end of the id stays, for `paceline why`."""
        whole = f"{self.identity} {self.name}".lstrip()
        if len(whole) <= width:
            return whole
        least = min(len(self.name), _LEAST_NAME + len(cut))
        whose = self.identity
        if len(whose) > (room := width - least - 1):
            whose = whose[: room - len(cut)] + cut
        left = width - len(whose) - bool(whose)
        name = self.name if len(self.name) <= left else cut + self.name[len(cut) - left :]
        return f"{whose} {name}".lstrip()

    @property
    def ended_us(self) -> int | None:
        return self.spans[-1][0] if self.spans and not self.spans[-1][1] else None

    def doing(self, from_us: float, to_us: float) -> str:
        """What it did last in this time."""
        found = ""
        for at, doing in self.spans:
            if at >= to_us:
                break
            if doing or at <= from_us:
                found = doing
        return found


class Timeline:
    """The steps of the last `seconds`; None: all. What is older is forgotten."""

    FIGURES = 7
    """Lines above the streams."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._steps: deque[Step] = deque()
        self._streams: OrderedDict[tuple[int, int], _Row] = OrderedDict()  # by number and completion
        self._arriving: dict[int, int] = {}  # microseconds that requests took until their next event, QUEUED
        self._forgotten = self._lost = 0
        self._has_forgotten = False  # steps

    def __len__(self) -> int:
        """Steps that are shown."""
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Add the next step."""
        self._steps.append(step)
        self._lost += step.lost
        self._arriving.clear()  # all events of an arrival are of one step
        for event in step.events:
            self._note(event, step.ended_us)
        if self.seconds is not None:
            first_us = step.ended_us - round(1e6 * self.seconds)
            while self._steps[0].ended_us < first_us:
                self._steps.popleft()
                self._has_forgotten = True

    def _note(self, event: RequestEvent, at_us: int) -> None:
        if event.kind in _ARRIVES:
            self._arriving[event.number] = self._arriving.get(event.number, 0) + event.value
            return
        if (begins := _BEGINS.get(event.kind)) is not None:
            key = event.number, event.completion
            stream = self._streams.get(key)
            if stream is None:
                name = event.request_id or f"#{event.number}"
                if event.completion:
                    name += f"[{event.completion}]"
                stream = self._streams[key] = _Row(event.identity, name)
                if len(self._streams) > MAX_STREAMS:
                    self._streams.popitem(last=False)
                    self._forgotten += 1
            if arriving_us := self._arriving.pop(event.number, 0):
                stream.spans.append((at_us - arriving_us, "arrives"))
            stream.spans.append((at_us, begins))
            return
        keys: Iterable[tuple[int, int]] = [(event.number, event.completion)]
        if event.kind == "refused":  # all completions
            keys = [key for key in self._streams if key[0] == event.number]
        for key in keys:
            if (ended := self._streams.get(key)) is not None and ended.ended_us is None:
                ended.spans.append((at_us, ""))

    def _forget_streams(self, first_us: int) -> None:
        """Forget those that ended before `first_us`."""
        for key, stream in list(self._streams.items()):
            if (ended_us := stream.ended_us) is not None and ended_us < first_us:
                del self._streams[key]

    def picture(
        self, width: int, most: int, *, now_us: int | None = None, ascii_only: bool = False
    ) -> RenderableType:
        """FIGURES lines, and up to `most` streams, the latest ones.

        now_us: the end of a live view, microseconds since 1970; None: the last step's.
        """
        if not self._steps:
            return Text("no step yet" if self.seconds is None else f"no step in the last {self.seconds:g} s")
        last_us = self._steps[-1].ended_us
        to_us = last_us if now_us is None else max(now_us, last_us)
        since_us = self._steps[0].started_us
        if self.seconds is not None:
            window_us = to_us - round(1e6 * self.seconds)
            since_us = window_us if self._has_forgotten else max(since_us, window_us)
            self._forget_streams(since_us)
        lines = self._figures(since_us, to_us, _ASCII_LEVELS if ascii_only else _LEVELS)
        columns = max(10, width - _NAME_WIDTH - 1)
        column_us = max(1.0, (to_us - since_us) / columns)
        streams = list(self._streams.values())
        hidden = max(0, len(streams) - most) + self._forgotten
        began = time.strftime("%H:%M:%S", time.localtime(since_us // 1_000_000))
        more = f", {hidden} earlier ones not shown" if hidden else ""
        key = "  ".join(f"{_ASCII[k] if ascii_only else _MARKS[k][0]} {v}" for k, v in _KEY.items())
        lines.append(
            Text(f"{began} and the {(to_us - since_us) / 1e6:.1f} s after   {key}{more}", style="dim")
        )
        for stream in streams[-most:]:
            line = Text(f"{stream.label(_NAME_WIDTH, _ASCII_CUT if ascii_only else _CUT):{_NAME_WIDTH}} ")
            for at in range(columns):
                doing = stream.doing(since_us + at * column_us, since_us + (at + 1) * column_us)
                mark, style = _MARKS[doing]
                line.append(_ASCII[doing] if ascii_only else mark, style)
            line.no_wrap, line.overflow = True, "crop"
            lines.append(line)
        return Group(*lines)

    def _figures(self, since_us: int, to_us: int, levels: str) -> list[Text]:
        steps = self._steps
        count, last = len(steps), steps[-1]
        seconds, idle_us = max(1e-6, (to_us - since_us) / 1e6), to_us - last.ended_us
        taken, planned = sum(s.taken_us for s in steps), sum(s.planned_us for s in steps)
        new, fed = sum(s.new_tokens for s in steps), sum(s.tokens for s in steps)
        decoded = sum(s.decode_rows + s.verify_rows + s.drafted_tokens for s in steps)
        drafted, accepted = sum(s.drafted_tokens for s in steps), sum(s.accepted_tokens for s in steps)
        events = [event for step in steps for event in step.events]
        prompts = sum(e.value for e in events if e.kind == "queued")
        cached = sum(e.value for e in events if e.kind == "admitted")
        blocked = Counter(s.reason for s in steps if s.reason)
        idle = f"; none for {idle_us / 1e6:.0f} s" if idle_us > 2_000_000 else ""
        lost = f"; {self._lost} lost: this reader was too slow" if self._lost else ""
        rows = (
            (
                "steps",
                f"{count / seconds:.1f} a second, {taken / count / 1000:.1f} ms each"
                f" ({planned / count / 1000:.1f} predicted){idle}{lost}",
                [s.taken_us for s in steps],
            ),
            (
                "tokens",
                f"{new / seconds:.0f} new and {max(0, fed - decoded) / seconds:.0f} of prompts a second",
                [s.tokens for s in steps],
            ),
            ("runs", counted(last.running, "sequence"), [s.running for s in steps]),
            (
                "waits",
                counted(last.waiting, "sequence")
                + "".join(
                    f", {n / count:.0%} for {reason}"
                    for reason, n in blocked.most_common(3)
                    if n >= count / 200
                ),
                [s.waiting for s in steps],
            ),
            (
                "pages",
                f"{last.free_pages} free, {min(s.free_pages for s in steps)} at least",
                [s.free_pages for s in steps],
            ),
            (
                "cache",
                (f"found {min(1.0, cached / prompts):.0%} of {prompts}" if prompts else "no prompts")
                + (f"; accepted {accepted / drafted:.0%} of {drafted} drafts" if drafted else ""),
                (),
            ),
        )
        part_us = max(1.0, (to_us - since_us) / _SPARK_WIDTH)

        def columns(ends_us: Iterable[int]) -> list[range]:
            began = (step.started_us - since_us for step in steps)
            return [
                range(int(at / part_us), int((end_us - since_us) / part_us) + 1)
                for at, end_us in zip(began, ends_us, strict=True)
            ]

        in_steps = columns(step.ended_us for step in steps)
        until_next = columns([*(step.started_us for step in islice(steps, 1, None)), to_us])
        return [
            Text.assemble(
                (f"{name:7}", "dim"),
                f"{_sparkline(values, in_steps if name in _OF_STEPS else until_next, levels)} {text}",
            )
            for name, text, values in rows
        ]


def _sparkline(values: Sequence[int], columns: Sequence[range], levels: str) -> str:
    """In each of _SPARK_WIDTH columns the largest of the values that are there, relative to that of all."""
    most, marks = max(values, default=0), [0] * _SPARK_WIDTH
    for value, where in zip(values, columns, strict=False):
        for at in where:
            if 0 <= at < _SPARK_WIDTH:
                marks[at] = max(marks[at], value)
    return "".join(levels[-(-mark * (len(levels) - 1) // most) if most else 0] for mark in marks)
