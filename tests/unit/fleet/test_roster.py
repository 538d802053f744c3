"""The roster gives each stack a slot of its own, and tells it of the others of its model."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from paceline_fleet.roster import GONE_S, SETTLE_S, Roster, StackReport
from paceline_fleet.spec import FleetSpec
from paceline_fleet.tokens import check_tokens, make_tokens, stack_token
from service_kit.token_file import read_tokens


def report(stack: str, slot: int = -1, model: str = "small", state: str = "serving") -> StackReport:
    return StackReport(stack, model, "1", "node", "host", 1, state, "", f"127.0.0.1:{ord(stack)}", slot=slot)


def test_each_stack_has_a_slot_of_its_own_and_hears_of_the_others_of_its_model() -> None:
    roster = Roster(3, now=-SETTLE_S)
    slots = [roster.report(report(name), [], 0)["slot"] for name in "ab"]
    assert slots == [0, 1]
    assert roster.report(report("x", model="large"), [], 0) == {
        "slot": 2,
        "others": [],
        "replaces": False,
    }
    assert roster.report(report("c"), [], 0)["slot"] == -1  # there are three
    assert [address for address, _ in roster.report(report("a", 0), [], 1)["others"]] == [
        f"127.0.0.1:{ord(name)}" for name in "bc"
    ]
    newer = replace(report("a", 0), version="2")
    assert roster.report(newer, [], 1)["replaces"]
    assert not roster.report(report("a", 0), [], 1)["replaces"]
    assert roster.report(report("b", 1, state="ended"), [], 1)["others"] == []
    assert roster.report(report("c"), [], 1)["slot"] == 1


def test_a_new_roster_waits_for_the_slots_that_are_taken_and_none_is_held_twice() -> None:
    roster = Roster(4, now=0)
    assert roster.report(report("a"), [], SETTLE_S / 2)["slot"] == -1
    assert roster.report(report("b", 0), [], SETTLE_S / 2)["slot"] == 0
    assert roster.report(report("a"), [], SETTLE_S)["slot"] == 1
    assert roster.report(report("c", 0), [], SETTLE_S)["slot"] == 2


def test_a_stack_that_reports_no_more_is_lost_with_its_reason_and_its_log_stays() -> None:
    roster = Roster(1, now=-SETTLE_S)
    roster.report(report("a"), ["a line"], 0)
    listing = roster.listing(GONE_S + 1)
    assert listing["stacks"] == []
    assert [(one["stack"], one["state"]) for one in listing["ended"]] == [("a", "lost")]
    assert roster.lines("a") == [("a", "a line")]
    assert roster.report(report("b"), [], GONE_S + 1)["slot"] == 0
    assert StackReport.of({**asdict(report("a")), "of_a_newer_version": 1}) == report("a")


def test_tokens_are_made_once_and_each_stack_alone_may_write_the_directory(tmp_path: Path) -> None:
    def spec(replicas: int) -> FleetSpec:
        model = {"name": "small", "backend": "oracle", "replicas": replicas}
        return FleetSpec.model_validate({"fleet": "chat", "home": tmp_path / "home", "models": [model]})

    make_tokens(spec(1))
    files = spec(1).token_files
    first = stack_token(files, 0)
    make_tokens(spec(3))
    assert stack_token(files, 0) == first
    found = {entry.identity.name: entry.identity for entry in read_tokens(files.clients)}
    assert [name for name, one in found.items() if one.directory] == [f"stack-{slot}" for slot in range(6)]
    assert [name for name, one in found.items() if one.admin] == ["fleet-admin"]
    assert first not in files.clients.read_text()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "home").iterdir())
    with pytest.raises(ValueError, match="none for stack 6"):
        stack_token(files, 6)
    named = spec(3).model_copy(update={"tokens": files})
    check_tokens(named)
    files.clients.write_text(files.clients.read_text().replace("directory: true", "admin: true"))
    with pytest.raises(ValueError, match=r"line 1: .* has no entry with `directory: true`"):
        check_tokens(named)


def test_a_pipe_in_the_place_of_a_made_token_hangs_no_start(tmp_path: Path) -> None:
    model = {"name": "small", "backend": "oracle"}
    given = FleetSpec.model_validate({"fleet": "chat", "home": tmp_path, "models": [model]})
    make_tokens(given)
    (given.directory / "client-token").unlink()
    os.mkfifo(given.directory / "client-token")
    with pytest.raises(OSError, match="is not a regular file"):
        make_tokens(given)
