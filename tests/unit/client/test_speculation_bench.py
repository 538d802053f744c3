"""`bench --speculation` compares like with like, and draws what it measured."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from paceline.cli import plot
from paceline.cli.load import Load, Trace
from paceline.cli.speculation_bench import PLAIN, Results, Spread, cells, compare, modes, result_of
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Drafter, Finished, FinishReason, ModelInfo, RequestLimits, Speculation, Usage

from tests.unit.client.conftest import Served

MODEL = ModelInfo("m", "oracle", 10, 100, 100, (), False, "float32", "0", b"", RequestLimits(*[1] * 9))


def trace(tokens_per_s: float, accepted: int = 0, verifications: int = 0) -> Trace:
    usage = Usage(4, 0, 9, 2 * accepted, accepted, 0, 0, 0, 0, verifications)
    arrivals = [(index / tokens_per_s, 1) for index in range(9)]
    return Trace(0.0, arrivals[-1][0], arrivals, Finished(0, FinishReason.LENGTH, usage))


def results() -> Results:
    plain = [[trace(10.0)], [trace(20.0)], [trace(40.0)]]
    drafted = [[trace(20.0, 3, 2)], [trace(30.0, 3, 2)], [trace(100.0, 0, 2)]]
    return {1: {PLAIN: result_of(plain, plain), "n-gram": result_of(drafted, plain)}}


def test_ratios_are_of_the_same_round() -> None:
    ngram = results()[1]["n-gram"]
    assert ngram.tokens_per_s.median == pytest.approx(30.0)
    assert (ngram.to_plain.least, ngram.to_plain.median, ngram.to_plain.most) == pytest.approx((1.5, 2, 2.5))
    assert (ngram.drafted_tokens, ngram.accepted_tokens, ngram.verifications) == (12, 6, 6)
    assert ngram.tokens_per_verification == 2.0
    assert results()[1][PLAIN].to_plain == Spread(1.0, 1.0, 1.0)
    assert results()[1][PLAIN].tokens_per_verification is None


def test_each_drafter_of_the_server_is_compared_alone_and_all_together() -> None:
    model = replace(MODEL, drafters=tuple(Drafter))
    assert list(modes(MODEL)) == ["plain", "automatic"]
    assert modes(model) == {
        "plain": Speculation("off"),
        "n-gram": Speculation("auto", Drafter.NGRAM),
        "draft": Speculation("auto", Drafter.DRAFT_EXECUTOR),
        "automatic": Speculation("auto"),
    }


async def test_all_modes_take_turns_at_the_same_prompts_and_share_no_cache(served: Served) -> None:
    model = await served.client.model_info()
    heard: list[tuple[str, int]] = []
    load = Load(prompt_tokens=6, new_tokens=3, salt="s")
    comparison = compare(
        served.client, model, load, [1, 2], 1, 10.0, lambda what, tokens: heard.append((what, tokens))
    )
    found = {level: by_mode async for level, by_mode in comparison}
    assert list(found) == [1, 2]
    assert list(found[2]) == ["plain", "n-gram", "automatic"]
    asked = [
        (request.speculation.mode, tuple(request.token_ids.ids), request.cache_salt)
        for request in served.fake.requests
    ]
    assert len(set(asked)) == len(asked) == 2 * 3 * (1 + 2)  # twice, the first unmeasured
    assert len({ids for _, ids, _ in asked}) == 2 * (1 + 2)
    assert [mode for mode, _, _ in asked[:3]] == [
        pb.SPECULATION_MODE_OFF,
        pb.SPECULATION_MODE_AUTO,
        pb.SPECULATION_MODE_AUTO,
    ]
    assert ("2 streams, n-gram", 1) in heard


def test_the_table_has_a_line_per_mode() -> None:
    plain, drafted = cells(1, results()[1])
    assert plain[:2] == ("1", "plain")
    assert drafted[:2] == ("", "n-gram")
    assert drafted[3:5] == ("2.00 (1.50-2.50)", "50% of 12")


def test_the_plot_is_a_png_and_an_svg(tmp_path: Path) -> None:
    for name in ("speculation", "speculation.png"):
        files = plot.write(results(), "model", tmp_path / name)
        assert [file.name for file in files] == ["speculation.png", "speculation.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "svg" in ET.parse(files[1]).getroot().tag
