"""`paceline rerank`: documents in the order of how well they answer a query."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from paceline.cli.answer import write
from paceline.cli.common import Addresses, TimeoutS, client_of
from paceline.cli.inputs import Adapter, InputFile, texts
from paceline.cli.loading import wait_for_model


class MethodChoice(enum.Enum):
    """What a document's score is."""

    YES_NO = "yes_no"
    LIKELIHOOD = "likelihood"


def rerank(
    context: typer.Context,
    addresses: Addresses,
    query: Annotated[str, typer.Argument(help="What is looked for.")],
    document: Annotated[
        list[str] | None, typer.Argument(help="Documents. Default: the lines of stdin.")
    ] = None,
    *,
    file: InputFile = None,
    method: Annotated[
        MethodChoice,
        typer.Option(
            help="likelihood: how likely the query is after the document; for any model. yes_no: how"
            " probable it is that the model says the document answers the query; for models trained to judge"
            " so (Qwen3-Reranker). Others, as the default model, rank wrong with it."
        ),
    ] = MethodChoice.YES_NO,
    instruction: Annotated[
        str | None, typer.Option(help="What makes a document fit.", show_default="it answers the query")
    ] = None,
    top_n: Annotated[int | None, typer.Option("--top-n", "-n", min=1, help="Documents printed.")] = None,
    model: Adapter = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per document: index, score, document.")
    ] = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Print documents by how well they answer a query, best first, each after its score.

    paceline rerank --method likelihood "Why is the sky blue?" "Grass is green." "Air scatters blue light."

    paceline rerank --method likelihood "Why is the sky blue?" --file lines.txt --top-n 3

    With a reranker, such as Qwen3-Reranker, leave out --method.
    """
    documents = texts(document, file)
    options: dict[str, Any] = {"method": method.value, "instruction": instruction, "top_n": top_n}
    if model is not None:
        options["model"] = model
    with client_of(context, addresses) as client:
        wait_for_model(client)
        reply = client.rerank(query, documents, timeout_s=timeout_s, **options)
        for one in reply.results:
            found = documents[one.index]
            line = {"index": one.index, "score": one.score, "document": found}
            if one.empty:
                line["empty"] = True
            score = "empty " if one.empty else f"{one.score:.4f}"
            write((json.dumps(line) if as_json else f"{score}  {found}") + "\n")
