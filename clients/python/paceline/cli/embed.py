"""`paceline embed`: vectors of texts."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.cli.answer import write
from paceline.cli.common import Addresses, TimeoutS, fail, one_line_errors, security
from paceline.cli.inputs import Adapter, InputFile, texts
from paceline.client import Client
from paceline.types import ModelInfo

_MAX_INPUTS = 64
"""Of one call: lines are printed as they come."""


class PoolingChoice(enum.Enum):
    """The hidden state that stands for a text."""

    LAST = "last"
    MEAN = "mean"


def embed(
    context: typer.Context,
    addresses: Addresses,
    text: Annotated[list[str] | None, typer.Argument(help="Texts. Default: the lines of stdin.")] = None,
    *,
    file: InputFile = None,
    pooling: Annotated[
        PoolingChoice, typer.Option(help="The hidden state of the last token, or the mean over all.")
    ] = PoolingChoice.LAST,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Keep the first so many values.", show_default="all")
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1.")
    ] = True,
    model: Adapter = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per text: index, tokens, embedding.")
    ] = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Print a vector for each text, one a line, in their order.

    paceline embed --json "The sky is blue." "Grass is green."

    paceline embed --json --file lines.txt > vectors.jsonl

    Texts get no template: what the model was trained to find around them, such as an instruction or an end
    token, must stand in them.
    """
    inputs = texts(text, file)
    options: dict[str, Any] = {"pooling": pooling.value, "normalize": normalize, "dimensions": dimensions}
    if model is not None:
        options["model"] = model
    with one_line_errors(", ".join(addresses)), Client(addresses, security=security(context)) as client:
        info = client.model_info(timeout_s=timeout_s)
        if not info.embedding_size:
            fail(f"{info.name} gives no vectors")
        size = inputs_per_call(info, dimensions)
        for first in range(0, len(inputs), size):
            reply = client.embed(inputs[first : first + size], timeout_s=timeout_s, **options)
            for index, (vector, tokens) in enumerate(zip(reply.vectors, reply.tokens, strict=True), first):
                line = {"index": index, "tokens": tokens, "embedding": vector}
                write((json.dumps(line) if as_json else " ".join(f"{one:.6g}" for one in vector)) + "\n")


def inputs_per_call(info: ModelInfo, dimensions: int | None) -> int:
    """How many vectors fit into a reply, and inputs into a call."""
    vector_bytes = 4 * (dimensions or info.embedding_size) + 64
    fitting = PUBLIC_MESSAGE_BYTES // vector_bytes
    return max(1, min(_MAX_INPUTS, info.limits.max_inputs, fitting))
