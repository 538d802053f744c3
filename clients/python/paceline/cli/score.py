"""`paceline score`: how likely a model finds texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated

import typer

from paceline.cli.answer import write
from paceline.cli.common import Addresses, TimeoutS, client_of, fail
from paceline.cli.inputs import Adapter, InputFile, read_text
from paceline.cli.loading import wait_for_model
from paceline.cli.rows import counted
from paceline.evaluations import EvaluationOptions, ScoredText, ScoreInputLike, TextToScore


def score(
    context: typer.Context,
    addresses: Addresses,
    text: Annotated[
        str | None, typer.Argument(help="The text; with --continuation: what comes before it.")
    ] = None,
    *,
    file: InputFile = None,
    continuation: Annotated[
        list[str] | None,
        typer.Option("--continuation", "-c", help="Score this after the text. Repeatable, to compare."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=0, help="Show each token, and the K likeliest instead of it.")
    ] = None,
    model: Adapter = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per scored text, with each token's logprob.")
    ] = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Say how likely texts are: perplexity, and logprobs of their tokens. Nothing is generated.

    paceline score "The sky is blue."

    paceline score "The sky is" -c " blue." -c " green."

    Logprobs are natural ones, before temperature. A text's first token has none. Perplexities compare texts
    of different lengths, for one model; the perplexity of a good guess is near 1.
    """
    if text is not None and file is not None:
        fail("give a text as argument or a --file, not both", 2)
    given = read_text(file) if text in (None, "-") else text
    assert given is not None
    inputs: list[ScoreInputLike] = [given]
    if continuation:
        inputs = [TextToScore(one, prompt=given) for one in continuation]
    options = EvaluationOptions() if model is None else EvaluationOptions(model=model)
    with client_of(context, addresses) as client:
        wait_for_model(client)
        reply = client.score(inputs, top_logprobs=top_k, timeout_s=timeout_s, **options)
        text_of = cache(lambda id_: client.detokenize([id_], timeout_s=timeout_s))
        for index, one in enumerate(reply.texts):
            if as_json:
                write(json.dumps(dataclasses.asdict(one)) + "\n")
                continue
            shown = f"  {continuation[index]!r}" if continuation else ""
            if not one.token_ids:
                write("no score: a text's first token has none, as nothing stands before it\n")
                continue
            count = counted(len(one.token_ids), "token")
            write(f"perplexity {one.perplexity:.3f}  logprob {one.logprob:.3f}  {count}{shown}\n")
            if top_k is not None:
                write("".join(_token_lines(one, text_of)))


def _token_lines(one: ScoredText, text_of: Callable[[int], str]) -> Iterator[str]:
    """Each token with its logprob and the likeliest in its place."""
    for id_, scored in zip(one.token_ids, one.logprobs, strict=True):
        best = "  ".join(f"{text_of(other)!r} {logprob:.3f}" for other, logprob in scored.top)
        yield f"{scored.logprob:10.3f}  {text_of(id_)!r}{'  | ' + best if best else ''}\n"
