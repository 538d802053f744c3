"""Says in one paragraph where a request is, what it waits for, and what would end that.

It follows the chain: a request behind others of its identity waits for what the first of these waits for; a
first whose turn it is not waits for what is next in turn, of which nothing but the reason is said.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_service.core.wait_report import Phase, WaitReport
from scheduler_service.core.waiting.reasons import OWN, WaitReason, WaitTimes

R = WaitReason

_FOR: Mapping[WaitReason, str] = {
    R.CALLERS_TURN: "earlier calls of its identity are read first",
    R.TOKENIZING: "its prompt becomes tokens",
    R.GRAMMAR_COMPILING: "the executor compiles its grammar",
    R.OWN_EARLIER: "earlier requests of the same identity are before it",
    R.OWN_PRIORITY: "requests of the same identity with a higher priority are before it",
    R.OTHER_TURN: "it is another identity's turn",
    R.OTHER_STEP_SHARE: "this step's share for new prompts went to another identity",
    R.OTHER_PROMPT: "a prompt that has begun takes the rest of each step",
    R.PREFIX: "the first completion, or another request with the same beginning, computes what both share",
    R.DEADLINES: "running requests would miss their deadlines if a prompt were computed beside them",
    R.ALONE: "a request whose executors were lost runs alone",
    R.SEATS: "all places are taken",
    R.PAGES: "there are too few KV pages",
    R.PAGES_IN_FLIGHT: "KV pages come back with steps that are being computed",
    R.RUNNING_PAGES: "running sequences lack KV pages, and go first",
    R.STEP_BUDGET: "the step's tokens or time are used up",
    R.ANSWER_BYTES: "the step's answer would be too large",
    R.ADAPTER_SLOT: "running sequences use all slots for adapters",
    R.EXECUTOR_SHORT: "the executor refused it, since it had no room of its own left",
    R.GRAMMAR_BEHIND: "the executor has not read its output with its grammar yet",
    R.DRAFT_EXECUTOR: "the step waits for the draft executor",
    R.NO_EXECUTOR: "no executor is ready",
}
"""Why it waits, after "because"."""
_OF_ONE: Mapping[WaitReason, str] = {
    R.SEATS: "the only place is taken",
    R.ADAPTER_SLOT: "running sequences use the only slot for adapters",
}
"""The same where there is only one in all."""

_MORE_PAGES = "an executor with a higher --kv-memory or --pages (serve: -E kv-memory=SIZE)"
_HELP: Mapping[WaitReason, str] = {
    R.CALLERS_TURN: "Fewer calls at once help.",
    R.TOKENIZING: "The wait ends by itself; prompts sent as token ids skip it.",
    R.GRAMMAR_COMPILING: "The wait ends when the grammar is compiled or refused; a smaller grammar helps, "
    "and one that was compiled before takes no time.",
    R.OTHER_STEP_SHARE: "The wait ends with one of the next steps.",
    R.OTHER_PROMPT: "The wait ends when that prompt is computed.",
    R.PREFIX: "The wait ends when that is computed.",
    R.DEADLINES: "The wait ends when they end; later deadlines, or a further stack, help.",
    R.ALONE: "The wait ends when that request has a token, or fails.",
    R.SEATS: "The wait ends when a running sequence ends; a higher --max-running (serve: -S max-running=N) "
    "helps if there are pages.",
    R.PAGES: f"The wait ends when running sequences end; shorter prompts help, or {_MORE_PAGES}.",
    R.PAGES_IN_FLIGHT: "The wait ends with the next answer of the executor.",
    R.RUNNING_PAGES: f"The wait ends when these got pages or were preempted; what helps is {_MORE_PAGES}.",
    R.STEP_BUDGET: "The wait ends with one of the next steps.",
    R.ANSWER_BYTES: "The wait ends with one of the next steps; fewer scores, or smaller ones, help.",
    R.ADAPTER_SLOT: "The wait ends when the last sequence with one of these adapters ends; what helps is an "
    "executor with a higher --adapter-slots (serve: -E adapter-slots=N).",
    R.EXECUTOR_SHORT: "The executor is asked again in 20 ms; other clients of it may hold its room.",
    R.GRAMMAR_BEHIND: "The wait ends when the grammar's process has read the output.",
    R.DRAFT_EXECUTOR: "The wait ends with that one's answer; a faster draft model, or none, helps.",
    R.NO_EXECUTOR: "The wait ends when an executor connects; `paceline status` says what each lacks.",
}
"""What ends it, and what would help. None for those that wait for other requests: the chain goes on there."""

_UNITS: Mapping[WaitReason, tuple[str, str]] = {
    R.PAGES: ("page", "pages"),
    R.PAGES_IN_FLIGHT: ("page", "pages"),
    R.ANSWER_BYTES: ("byte", "bytes"),
}

_LONG_STEP_S = 1.0
"""A step that was sent for longer than this, and twice what steps take, is said to be without an answer."""


def explanation(report: WaitReport, now: float) -> str:
    """The paragraph. `now`: on the report's clock, in seconds."""
    sentences = [_where(report, now)]
    if report.reason:
        sentences += _chain(report)
    sentences += _pace(report)
    has_run = report.phase not in (Phase.ARRIVING, Phase.QUEUED)
    first = "Before its first step it waited" if has_run else "So far it has waited"
    for times, what in ((report.queue_waits, first), (report.preempted_waits, "Later it waited")):
        if sums := _sums(times):
            sentences.append(f"{what} {sums}.")
    return " ".join(sentences)


def _where(report: WaitReport, now: float) -> str:
    since = _duration(now - report.since)
    match report.phase:
        case Phase.ARRIVING:
            return f"Came {since} ago, and is not queued yet."
        case Phase.QUEUED:
            predicted = _predicted(report.predicted_wait_s)
            return f"Queued for {since} ({predicted}){_place(report)}{_adapter(report)}."
        case Phase.PREEMPTED:
            why = "since its place or its pages went to others, or its executor was lost"
            return f"Waits again for {since}, {why}{_place(report)}{_adapter(report)}."
        case Phase.RUNNING:
            return f"Runs, for {since}{_adapter(report)}."
        case Phase.ENDED:
            return f"Ended {since} ago.{_own_pace(report)}"


def _predicted(wait_s: float | None) -> str:
    if wait_s is None:
        return "not predicted: too few requests had ended"
    return f"predicted: {_duration(wait_s)}" if wait_s >= 0.5e-3 else "no wait was predicted"


def _place(report: WaitReport) -> str:
    return f", number {report.position} in the queue of its identity" if report.position else ""


def _adapter(report: WaitReport) -> str:
    """With its fingerprint as `paceline adapters list` shows it."""
    return f", with the adapter {report.adapter.hex()[:12]}" if report.adapter else ""


def _own_pace(report: WaitReport) -> str:
    if report.token_s < 0.5e-3:
        return ""
    return f" It got {report.tokens} tokens, one every {_duration(report.token_s)}."


def _chain(report: WaitReport) -> list[str]:
    """From the request to what has to end, and what would help."""
    reason = report.reason
    sentences = [_because("It waits", reason, report)]
    if reason in OWN and report.first_reason and report.first_reason not in OWN:
        reason = report.first_reason
        sentences.append(_because("The first of these waits", reason, report))
    if reason is R.OTHER_TURN and report.next_reason and report.next_reason is not R.OTHER_TURN:
        reason = report.next_reason
        sentences.append(f"What is next in turn waits because {_reason(reason, report.total)}.")
    if report.reason is R.OWN_EARLIER:
        sentences.append("Fewer requests of its identity at once help.")
    if reason in _HELP:
        sentences.append(_HELP[reason])
    return sentences


def _reason(reason: WaitReason, total: int) -> str:
    """Why something waits. total: how many there are of what it lacks; 0: not known."""
    if not total or reason not in _OF_ONE:
        return _FOR[reason]
    return _OF_ONE[reason] if total == 1 else _FOR[reason].replace("all ", f"all {total} ")


def _pace(report: WaitReport) -> list[str]:
    """How long steps take: whatever runs, or waits for what runs, is as slow as they are."""
    takes = f"Steps take {_duration(report.step_s)} each" if report.step_s else "No step was answered yet"
    if report.step_age_s > max(_LONG_STEP_S, 2 * report.step_s):
        return [f"{takes}; the last one was sent {_duration(report.step_age_s)} ago, and has no answer yet."]
    return [f"{takes}."] if report.step_s else []


def _because(begin: str, reason: WaitReason, report: WaitReport) -> str:
    counted = ""
    if reason is report.first_reason and report.needed and reason in _UNITS:
        unit = _UNITS[reason][report.needed != 1]
        of_all = f" of {report.total}" if report.total else ""
        counted = f": it needs {report.needed} {unit}, {report.available}{of_all} are free"
    elif reason is report.first_reason and report.needed and reason is R.RUNNING_PAGES:
        counted = f": {report.needed} of them"
    return f"{begin} because {_reason(reason, report.total)}{counted}."


def _sums(times: WaitTimes) -> str:
    ordered = sorted((one for one in times if one[1] >= 0.5e-3), key=lambda one: -one[1])
    return ", ".join(f"{_duration(seconds)} for {reason.name.lower()}" for reason, seconds in ordered)


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
