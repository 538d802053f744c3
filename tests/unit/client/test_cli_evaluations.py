"""`paceline score`, `embed`, `rerank` and `adapters`: what they send, and what they print."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.app import app
from paceline.cli.embed import inputs_per_call
from paceline.scheduler.v1 import scheduler_pb2 as pb
from typer.testing import CliRunner, Result

from tests.unit.client.conftest import Served


async def invoked(served: Served, *arguments: str, stdin: str = "") -> Result:
    command = [*arguments, "-a", served.address]
    return await asyncio.to_thread(CliRunner().invoke, app, command, input=stdin)


def lines(result: Result) -> list[Any]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_score_says_the_perplexity_of_a_text(served: Served, tmp_path: Path) -> None:
    said = "perplexity 1.500  logprob -1.000  2 tokens\n"
    (tmp_path / "text").write_text("abc", encoding="utf-8")
    from_file = ["--file", str(tmp_path / "text")]
    for arguments, stdin in ((["abc"], ""), (from_file, ""), ([], "abc"), (["-"], "abc")):
        result = await invoked(served, "score", *arguments, stdin=stdin)
        assert (result.exit_code, result.stdout) == (0, said)
        sent = served.fake.evaluations[-1]
        assert isinstance(sent, pb.ScoreRequest)
        assert ([one.text for one in sent.inputs], sent.HasField("top_logprobs")) == (["abc"], False)


async def test_score_compares_continuations_and_shows_what_was_likelier(served: Served) -> None:
    result = await invoked(served, "score", "before", "-c", "hi", "-c", "!", "--top-k", "1", "--model", "a")
    assert result.stdout.splitlines() == [
        "perplexity 1.500  logprob -1.000  2 tokens  'hi'",
        "    -0.500  'h'  | 'A' -0.500",
        "    -0.500  'i'  | 'A' -0.500",
        "perplexity 1.500  logprob -0.500  1 token  '!'",
        "    -0.500  '!'  | 'A' -0.500",
    ]
    sent = served.fake.evaluations[-1]
    assert isinstance(sent, pb.ScoreRequest)
    assert [(one.prompt_text, one.text) for one in sent.inputs] == [("before", "hi"), ("before", "!")]
    assert (sent.model, sent.top_logprobs) == ("a", 1)


async def test_score_as_json_has_each_tokens_logprob(served: Served) -> None:
    [one] = lines(await invoked(served, "score", "abc", "--top-k", "1", "--json"))
    assert one == {
        "token_ids": [98, 99],
        "logprobs": [{"logprob": -0.5, "top": [[65, -0.5]]}] * 2,
        "logprob": -1.0,
        "perplexity": 1.5,
    }


async def test_embed_prints_a_vector_a_line_over_several_calls(served: Served) -> None:
    result = await invoked(served, "embed", "--json", stdin="a\n\nbb\nccc\ndddd\n")
    assert [(one["index"], one["tokens"], one["embedding"][0]) for one in lines(result)] == [
        (0, 1, 1.0),
        (1, 2, 2.0),
        (2, 3, 3.0),
        (3, 4, 4.0),
    ]
    assert len(served.fake.evaluations) == 2  # the fake takes three inputs a call
    options = ["--dimensions", "2", "--pooling", "mean", "--no-normalize", "--model", "a"]
    result = await invoked(served, "embed", "ab", *options)
    assert result.stdout == "2 0.5\n"
    sent = served.fake.evaluations[-1]
    assert isinstance(sent, pb.EmbedRequest)
    assert (sent.dimensions, sent.pooling, sent.normalize, sent.model) == (2, pb.POOLING_MEAN, False, "a")
    assert sent.WhichOneof("prompt") is None


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        (["--prompt", "Query: "], "prompt_text", "Query: "),
        (["--prompt", ""], "prompt_text", ""),
        (["--prompt-name", "query", "--pooling", "cls"], "prompt_name", "query"),
    ],
)
async def test_embed_sends_its_prompt_and_leaves_the_rest_to_the_model(
    served: Served, options: list[str], kind: str, value: str
) -> None:
    await invoked(served, "embed", "ab", *options)
    sent = served.fake.evaluations[-1]
    assert isinstance(sent, pb.EmbedRequest)
    assert sent.WhichOneof("prompt") == kind
    assert getattr(sent, kind) == value
    assert not sent.HasField("normalize")
    assert sent.pooling == (pb.POOLING_CLS if "cls" in options else pb.POOLING_UNSPECIFIED)


async def test_a_call_has_no_more_vectors_than_its_reply_can_hold(served: Served) -> None:
    info = await served.client.model_info()
    assert inputs_per_call(info, None) == 3
    assert inputs_per_call(info, 1 << 19) == 1


async def test_rerank_prints_the_best_first(served: Served) -> None:
    result = await invoked(served, "rerank", "q", "a", "ccc", "bb")
    assert result.stdout == "0.8000  ccc\n0.7500  bb\n0.6667  a\n"
    result = await invoked(served, "rerank", "q", "", "a")
    assert result.stdout == "0.6667  a\nempty   \n"
    [_, empty] = lines(await invoked(served, "rerank", "q", "", "a", "--json"))
    assert empty == {"index": 0, "score": 0, "document": "", "empty": True}
    options = ["--method", "likelihood", "--instruction", "i", "--top-n", "1", "--model", "a", "--json"]
    [best] = lines(await invoked(served, "rerank", "q", *options, stdin="a\nccc\n"))
    assert best == {"index": 1, "score": 0.8, "document": "ccc"}
    sent = served.fake.evaluations[-1]
    assert isinstance(sent, pb.RerankRequest)
    assert (sent.method, sent.instruction, sent.top_n) == (pb.RERANK_METHOD_LIKELIHOOD, "i", 1)
    assert sent.model == "a"


async def test_adapters_are_loaded_listed_and_unloaded(served: Served) -> None:
    assert (await invoked(served, "adapters", "list")).stdout == "no adapter is loaded\n"
    said = "a  rank 4  0.0 MiB  64  7 requests, 0 running, 0 waiting\n"
    assert (await invoked(served, "adapters", "load", "a", "d")).stdout == said
    assert (await invoked(served, "adapters", "list")).stdout == said
    [one] = lines(await invoked(served, "adapters", "list", "--json"))
    assert (one["name"], one["fingerprint"], one["memory_bytes"]) == ("a", "64", 1000)
    assert (await invoked(served, "adapters", "unload", "a")).stdout == "a is unloaded\n"
    assert (await invoked(served, "adapters", "unload", "a")).stdout == "a was not loaded\n"
    assert lines(await invoked(served, "adapters", "list", "--json")) == []


async def test_generate_and_chat_name_an_adapter(served: Served) -> None:
    await invoked(served, "generate", "words", "--model", "a")
    await invoked(served, "chat", "--model", "a", stdin="words\n")
    assert [one.model for one in served.fake.requests] == ["a", "a"]
    refused = await invoked(served, "chat", "--model", "b", stdin="words\n")
    assert refused.stderr == "paceline: model: 'b' is not served; served: a, fake\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["score", "x", "--file", "y"], "not both"),
        (["embed", "x", "--file", "y"], "not both"),
        (["embed", "--file", "/nowhere"], "--file: /nowhere"),
        (["embed", "x", "--prompt", "", "--prompt-name", "a"], "not both"),
        (["rerank", "q"], "there is no text"),
        (["adapters", "list", "-a", "127.0.0.1:1"], "nobody listens: 127.0.0.1:1"),
        (["score", "x", "-a", "127.0.0.1:1"], "nobody listens: 127.0.0.1:1"),
    ],
)
def test_what_is_missing_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments, input="")
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
