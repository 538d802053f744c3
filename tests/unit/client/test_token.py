"""`paceline token`: what it prints is a token and the entry that lets it in."""

from __future__ import annotations

import hashlib

import pytest
import yaml
from paceline.cli.app import app
from paceline.cli.token import entry
from typer.testing import CliRunner


def test_the_entry_has_the_hash_of_the_token_and_not_the_token() -> None:
    result = CliRunner().invoke(app, ["token", "alice", "--weight", "2", "--max-priority", "5", "--admin"])
    assert result.exit_code == 0, result.output
    token, line = result.stdout.splitlines()
    assert token not in line
    assert yaml.safe_load(line) == [
        {
            "name": "alice",
            "sha256": hashlib.sha256(token.encode()).hexdigest(),
            "weight": 2.0,
            "max_priority": 5,
            "admin": True,
        }
    ]


def test_no_token_is_drawn_twice() -> None:
    drawn = {CliRunner().invoke(app, ["token", "alice"]).stdout.splitlines()[0] for _ in range(20)}
    assert len(drawn) == 20
    assert all(len(token) >= 43 for token in drawn)


@pytest.mark.parametrize("name", ["no", "1e5", "0x1F", "null", "2026-01-01"])
def test_a_name_stays_a_name_in_yaml(name: str) -> None:
    assert yaml.safe_load(entry(name, "x")) == [{"name": name, "sha256": hashlib.sha256(b"x").hexdigest()}]


@pytest.mark.parametrize("name", ["", "two words", 'a"b', "ä", "x" * 65])
def test_a_name_that_the_file_does_not_take_is_refused(name: str) -> None:
    result = CliRunner().invoke(app, ["token", name])
    assert result.exit_code == 2
    assert "NAME: expected" in result.stderr
    assert result.stdout == ""
