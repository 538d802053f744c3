"""A stack's model is fetched to its node once, and what the hub refuses is the stack's reason."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.cli.supervisor import ChildFailed
from paceline_fleet.node_models import model_on_node

from tests.support.checkout import environment
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

TENSORS = struct.pack("<Q", 2) + b"{}" + bytes(3_000_000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("PACELINE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with fake_hub() as hub:
        hub.files = {
            "owner/tiny": {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": TENSORS}
        }
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


async def test_a_model_is_fetched_once_for_all_stacks_of_a_node(hub: FakeHub) -> None:
    told: list[str] = []
    paths = await asyncio.gather(*(model_on_node("torch", "owner/tiny", told.append) for _ in range(2)))
    paths.append(await model_on_node("torch", "owner/tiny", told.append))
    assert {path.name for path in paths if path} == {COMMIT}
    assert sum(one.startswith("GET") and "safetensors" in one for one in hub.asked) == 1
    assert told[0].startswith("fetching owner/tiny: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("owner/gated", r"^owner/gated is gated: accept its terms at \S+, then run `hf auth login`"),
        ("owner/nothing", r"^\S+ has no owner/nothing, or it is private \(set HF_TOKEN\)$"),
        ("/nowhere/at/all", r"^/nowhere/at/all is not on this node"),
    ],
)
async def test_what_is_refused_is_the_reason(hub: FakeHub, given: str, said: str) -> None:
    hub.files["owner/gated"] = hub.files["owner/tiny"]
    hub.gated = {"owner/gated"}
    with pytest.raises(ChildFailed, match=said):
        await model_on_node("torch", given, print)


async def test_a_download_ends_with_the_start_that_needs_it(hub: FakeHub) -> None:
    begun = asyncio.Event()
    start = asyncio.create_task(model_on_node("torch", "owner/tiny", lambda _: begun.set()))
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert (
        await model_on_node("torch", "owner/tiny", print) is not None
    )  # nothing is left that would hinder it
