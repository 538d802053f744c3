"""Token counts of answers, and why completions ended, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline import Finished, FinishReason


def usage(prompts: Sequence[Sequence[Finished]]) -> dict[str, Any]:
    """Of the ends of all completions, by prompt: a prompt counts once, whatever `n` is."""
    ends = [end.usage for completions in prompts for end in completions]
    firsts = [completions[0].usage for completions in prompts if completions]
    prompt, completion = sum(one.prompt_tokens for one in firsts), sum(one.completion_tokens for one in ends)
    accepted = sum(one.accepted_tokens for one in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in ends),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(one.drafted_tokens for one in ends) - accepted,
        },
    }


def reason(end: Finished, *, called: bool = False) -> str:
    """`stop`, `length`, or `tool_calls` where the model ended with calls."""
    if end.reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"


def stopped_by(end: Finished) -> str | int | None:
    """The stop string or stop token that ended a completion; None: the model itself, or the length."""
    return end.stop_string if end.stop_string is not None else end.stop_token_id


def prompt_usage(*replies: Any) -> dict[str, Any]:
    """Of calls that generate nothing."""
    tokens = sum(reply.usage.prompt_tokens for reply in replies)
    cached = sum(reply.usage.cached_tokens for reply in replies)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def in_order(ends: Iterable[Finished]) -> list[Finished]:
    """By the completion's index."""
    return sorted(ends, key=lambda end: end.index)
