"""`paceline embed`: vectors of texts."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.cli.answer import write
from paceline.cli.common import Addresses, TimeoutS, client_of, fail
from paceline.cli.inputs import Adapter, InputFile, texts
from paceline.cli.loading import wait_for_model
from paceline.cli.rows import counted
from paceline.types import ModelInfo

_MAX_INPUTS = 64
"""Of one call: lines are printed as they come."""
_SHOWN = 4
"""Numbers of a vector that a terminal is shown."""


class PoolingChoice(enum.Enum):
    """The hidden state that stands for a text."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


def embed(
    context: typer.Context,
    addresses: Addresses,
    text: Annotated[list[str] | None, typer.Argument(help="Texts. Default: the lines of stdin.")] = None,
    *,
    file: InputFile = None,
    pooling: Annotated[
        PoolingChoice | None,
        typer.Option(
            help="The hidden state of the last token, the mean over all, or that of the first.",
            show_default="the model's own",
        ),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Number of values kept, the first.", show_default="all")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Scale vectors to length 1.", show_default="the model's own"
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="A text before each text; '': none.", show_default="the model's default prompt"),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's own prompt of this name.")
    ] = None,
    model: Adapter = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per text: index, tokens, embedding.")
    ] = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Print a vector for each text, one a line, in their order; a terminal is shown its beginning.

    paceline embed --json "The sky is blue." "Grass is green."

    paceline embed --json --file lines.txt > vectors.jsonl

    paceline embed --prompt-name query "Why is the sky blue?"

    Texts get no chat template. They get the tokens that the model's tokenizer puts around a text. Pooling,
    normalization and prompt are those of the model's own files, unless an option says otherwise.
    """
    if prompt is not None and prompt_name is not None:
        fail("give --prompt or --prompt-name, not both", 2)
    inputs = texts(text, file)
    options: dict[str, Any] = {"normalize": normalize, "dimensions": dimensions}
    options |= {"prompt": prompt, "prompt_name": prompt_name}
    if pooling is not None:
        options["pooling"] = pooling.value
    if model is not None:
        options["model"] = model
    with client_of(context, addresses) as client:
        wait_for_model(client)
        info = client.model_info(timeout_s=timeout_s)
        if not info.embedding_size:
            fail(f"{info.name} gives no vectors")
        size = inputs_per_call(info, dimensions)
        for first in range(0, len(inputs), size):
            reply = client.embed(inputs[first : first + size], timeout_s=timeout_s, **options)
            for index, (vector, tokens) in enumerate(zip(reply.vectors, reply.tokens, strict=True), first):
                if as_json:
                    write(json.dumps({"index": index, "tokens": tokens, "embedding": vector}) + "\n")
                elif sys.stdout.isatty():
                    write(_summary(index, vector, tokens) + "\n")
                else:
                    write(" ".join(f"{one:.6g}" for one in vector) + "\n")


def _summary(index: int, vector: Sequence[float], tokens: int) -> str:
    """What of a vector fits on a terminal."""
    first = " ".join(f"{one:.4f}" for one in vector[:_SHOWN])
    more = " ..." if len(vector) > _SHOWN else ""
    sizes = f"{counted(tokens, 'token')}, {counted(len(vector), 'number')}"
    return f"{index}: {sizes}, norm {math.hypot(*vector):.4f}: {first}{more}"


def inputs_per_call(info: ModelInfo, dimensions: int | None) -> int:
    """How many vectors fit into a reply, and inputs into a call."""
    vector_bytes = 4 * (dimensions or info.embedding_size) + 64
    fitting = PUBLIC_MESSAGE_BYTES // vector_bytes
    return max(1, min(_MAX_INPUTS, info.limits.max_inputs, fitting))
