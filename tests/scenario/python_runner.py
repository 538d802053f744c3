"""Runs steps of the scenario with the Python SDK."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paceline
from paceline import errors
from paceline.channel import Security
from paceline.evaluations import TextToScore
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline.types import Completion, Delta

Step = Mapping[str, Any]

_ARGUMENTS = {
    "text": "prompt",
    "strings": "stop",
    "tokenIds": "token_ids",
    "topP": "top_p",
    "maxTokens": "max_tokens",
    "ignoreEos": "ignore_eos",
    "requestId": "request_id",
    "cacheSalt": "cache_salt",
    "promptLogprobs": "prompt_logprobs",
}
"""The SDK's arguments by the names of proto3's JSON, where they differ."""


def main() -> None:
    """Run the steps of stdin."""
    for line in sys.stdin:
        step = json.loads(line)
        with client_of(step) as client:
            try:
                outcome = run(client, step)
            except errors.PacelineError as error:
                outcome = {"error": error_of(error)}
        write(outcome)


def client_of(step: Step) -> paceline.Client:
    """The step's client."""
    return paceline.Client(
        step["addresses"],
        security=Security(ca_file=Path(step["ca"]) if "ca" in step else None, token=step.get("token", "")),
        failover_timeout_s=step.get("failover_timeout_ms", 1000 * FAILOVER_TIMEOUT_S) / 1000,
    )


def run(client: paceline.Client, step: Step) -> dict[str, Any]:
    """The outcome of a step. Raises PacelineError."""
    match step["call"]:
        case "model_info":
            info = client.model_info()
            return {"name": info.name, "has_chat_template": info.has_chat_template}
        case "tokenize":
            return {"token_ids": client.tokenize(step["text"])}
        case "detokenize":
            return {"text": client.detokenize(step["token_ids"])}
        case "complete":
            return {"completions": [completion_of(one) for one in client.completions(**arguments(step))]}
        case "generate" if "parallel" in step:
            return parallel(client, step)
        case "generate":
            return generate(client, step)
        case "score":
            return score(client, step["request"])
        case "embed":
            return embed(client, step["request"])
        case "rerank":
            return rerank(client, step["request"])
    raise ValueError(f"unknown call {step['call']}")


def parallel(client: paceline.Client, step: Step) -> dict[str, Any]:
    """As many streams at once; only the first one reports."""
    others = {name: value for name, value in step.items() if name != "report_after_tokens"}
    with ThreadPoolExecutor(step["parallel"]) as threads:
        found = list(threads.map(lambda i: generate(client, others if i else step), range(step["parallel"])))
    return {**found[0], "different": sum(one != found[0] for one in found)}


def generate(client: paceline.Client, step: Step) -> dict[str, Any]:
    """Stream; leave, abort or report after as many tokens as the step says."""
    before = 0
    with client.generate(**arguments(step)) as stream:
        for event in stream:
            tokens = before + (len(event.token_ids) if isinstance(event, Delta) else 0)
            if before < step.get("leave_after_tokens", 0) <= tokens:
                return {"left": True}
            if before < step.get("abort_after_tokens", 0) <= tokens:
                client.abort([stream.request_id()])
            if before < step.get("report_after_tokens", 0) <= tokens:
                write({"received": tokens})
            before = tokens
        return {
            "completions": [completion_of(one) for one in stream.collect()],
            "prompt_logprobs": [one.logprob for one in stream.prompt_logprobs],
        }


def score(client: paceline.Client, request: Step) -> dict[str, Any]:
    """Score texts."""
    inputs = [TextToScore(text=one["text"], prompt=one.get("promptText")) for one in request["inputs"]]
    texts = client.score(inputs).texts
    return {"scores": [{"token_ids": list(one.token_ids), "logprob": one.logprob} for one in texts]}


def embed(client: paceline.Client, request: Step) -> dict[str, Any]:
    """Embed texts."""
    texts = [one["text"] for one in request["inputs"]]
    return {"vectors": client.embed(texts, dimensions=request["dimensions"]).vectors}


def rerank(client: paceline.Client, request: Step) -> dict[str, Any]:
    """Rank documents."""
    assert request["method"] == "RERANK_METHOD_LIKELIHOOD"
    reply = client.rerank(request["query"], request["documents"], method="likelihood", top_n=request["topN"])
    return {"results": [{"index": one.index, "score": one.score} for one in reply.results]}


def arguments(step: Step) -> dict[str, Any]:
    """The step's request as arguments of the SDK."""
    request = dict(step["request"])
    flat = {**request.pop("sampling", {}), **request.pop("stop", {}), **request}
    found = {_ARGUMENTS.get(name, name): value for name, value in flat.items()}
    if "seed" in found:
        found["seed"] = int(found["seed"])
    if "messages" in found:
        found["messages"] = found["messages"]["messages"]
    if "token_ids" in found:
        found["token_ids"] = found["token_ids"]["ids"]
    if "affinity_key" in step:
        found["affinity_key"] = step["affinity_key"]
    if "timeout_ms" in step:
        found["timeout_s"] = step["timeout_ms"] / 1000
    return found


def completion_of(one: Completion) -> dict[str, Any]:
    """A completion as the scenario has it."""
    assert one.finished is not None
    return {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "reason": one.finished.reason.value,
        "stop_string": one.finished.stop_string or "",
        "prompt_tokens": one.finished.usage.prompt_tokens,
        "completion_tokens": one.finished.usage.completion_tokens,
    }


def error_of(error: errors.PacelineError) -> dict[str, Any]:
    """An error as the scenario has it."""
    hint_s = error.retry_after_s if isinstance(error, errors.RetryLater) else None
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "retryable": isinstance(error, errors.RetryLater),
        "retry_after_ms": None if hint_s is None else 1000 * hint_s,
        "lost": isinstance(error, errors.StreamLost),
    }


def write(outcome: Mapping[str, Any]) -> None:
    """Write one line."""
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
