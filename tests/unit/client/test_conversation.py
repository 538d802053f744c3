"""The commands of `paceline chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paceline.chat import Message
from paceline.cli.conversation import COMMANDS, HELP, Conversation, Refused, command_of


@pytest.fixture
def talk() -> Conversation:
    made = Conversation({}, "Be brief.")
    made.answered("one?", "1")
    made.answered("two?", "2")
    return made


def test_undo_forgets_a_turn_and_gives_its_question_for_retry(talk: Conversation) -> None:
    assert talk.undo() == "two?"
    assert talk.asking("and?") == [
        Message("system", "Be brief."),
        Message("user", "one?"),
        Message("assistant", "1"),
        Message("user", "and?"),
    ]
    talk.undo()
    with pytest.raises(Refused, match="nothing was asked"):
        talk.undo()


def test_a_saved_conversation_is_loaded_again_and_never_overwrites_a_file(
    talk: Conversation, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    assert talk.save(str(file)) == f"5 messages in {file}"
    assert json.loads(file.read_text())["messages"][:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
    ]
    with pytest.raises(Refused, match="there is such a file"):
        talk.save(str(file))
    again = Conversation({})
    again.load(str(file))
    assert (again.system, again.turns) == (talk.system, talk.turns)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a\0b", "", "/nowhere/x"])
def test_a_name_that_is_no_file_is_refused(name: str, talk: Conversation) -> None:
    for use in (talk.save, talk.load):
        with pytest.raises(Refused):
            use(name)


def test_any_text_is_saved(talk: Conversation, tmp_path: Path) -> None:
    talk.answered("\ud800", "ü")
    talk.save(str(tmp_path / "talk.json"))
    again = Conversation({})
    again.load(str(tmp_path / "talk.json"))
    assert again.turns == talk.turns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"messages": 3}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "x"}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation_is_refused_and_changes_nothing(
    text: str, talk: Conversation, tmp_path: Path
) -> None:
    (tmp_path / "talk.json").write_text(text)
    before = [*talk.turns]
    with pytest.raises(Refused, match=r"talk\.json"):
        talk.load(str(tmp_path / "talk.json"))
    assert (talk.system, talk.turns) == ("Be brief.", before)
    with pytest.raises(Refused, match="No such file"):
        talk.load(str(tmp_path / "nothing"))


def test_options_are_set_shown_and_set_back(talk: Conversation) -> None:
    assert talk.set("") == "all are the server's defaults"
    assert talk.set("temperature 0.7") == "temperature: 0.7"
    assert talk.set("max-tokens 20") == "max_tokens: 20"
    assert talk.options == {"temperature": 0.7, "max_tokens": 20}
    assert talk.set("") == "temperature: 0.7\nmax_tokens: 20"
    assert talk.set("temperature default") == "temperature: the default"
    assert talk.options == {"max_tokens": 20}
    for wrong in (
        "seed 0.5",
        "temperature warm",
        "temperature -3",
        "temperature nan",
        "max_tokens 0",
        "model other",
        "labels x",
    ):
        with pytest.raises(Refused):
            talk.set(wrong)


def test_commands_are_told_from_questions() -> None:
    assert command_of("/set top_p 0.5 ") == ("/set", "top_p 0.5")
    assert command_of("  /retry") == ("/retry", "")
    assert command_of("/etc/passwd is what?") is None
    assert command_of("/etc is what?") is None
    assert command_of("what is /etc?") is None
    assert command_of("/help me") == ("/help", "me")
    assert command_of("/set\nis a word of two lines") is None
    assert command_of("/nothing") == ("/nothing", "")
    assert all(name in HELP for name in COMMANDS)
