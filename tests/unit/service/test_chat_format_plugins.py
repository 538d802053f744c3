"""A package brings a format of calls, which --tool-format names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from service_kit.plugins import PluginError

from scheduler_service.chat.formats import FORMATS
from scheduler_service.chat_formats import ChatFormats
from scheduler_service.config import SchedulerSettings

PLUGIN = """
from scheduler_service.chat.formats import FORMATS
from dataclasses import replace

def make(added):
    if "<call>" not in added:
        return None
    return replace(FORMATS["hermes"](added), name="angles", markers={added["<call>"]: "<call>"})

make.markers = ("<call>",)

def fails(added):
    raise KeyError("no idea")

def other(added):
    return "hermes"

def text(added):
    return None

text.markers = "abc"
"""
TEMPLATE = "{% if tools %}{{ tools }}{% endif %}"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "angled_calls.py").write_text(PLUGIN)
    info = tmp_path / "angles-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: angles\nVersion: 1.0\n")
    entries = "angles = angled_calls:make\nfails = angled_calls:fails\nmissing = angled_calls:nothing\n"
    entries += "other = angled_calls:other\ntext = angled_calls:text\n"
    (info / "entry_points.txt").write_text(f"[paceline.chat_formats]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "angled_calls", raising=False)


@pytest.mark.usefixtures("install")
def test_an_installed_package_brings_a_format_with_markers_of_its_own() -> None:
    formats = ChatFormats("angles")
    assert formats.markers == ("<call>",)
    made = formats.format_of(TEMPLATE, {"<call>": 7})
    assert made is not None
    assert (made.name, made.markers) == ("angles", {7: "<call>"})
    assert formats.format_of(TEMPLATE, {}) is None  # the model lacks the token
    assert formats.format_of("no tools", {"<call>": 7}) is None
    assert SchedulerSettings.from_command_line(["--tool-format", "angles"], "scheduler").tool_format


@pytest.mark.usefixtures("install")
def test_a_broken_format_is_named_with_the_reason() -> None:
    with pytest.raises(PluginError, match=r"chat format plugin fails \(angles 1.0\): KeyError: 'no idea'"):
        ChatFormats("fails").format_of(TEMPLATE, {})
    with pytest.raises(PluginError, match=r"plugin other .*: TypeError: it made a str"):
        ChatFormats("other").format_of(TEMPLATE, {})
    with pytest.raises(PluginError, match=r"plugin text .*: TypeError"):
        ChatFormats("text")
    with pytest.raises(PluginError, match=r"plugin missing \(angles 1.0\): AttributeError"):
        ChatFormats("missing")


def test_a_format_that_nobody_has_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        SchedulerSettings.from_command_line(["--tool-format", "nobodys"], "scheduler")
    said = " ".join(capsys.readouterr().err.split())
    assert "nobodys" in said
    assert all(name in said for name in FORMATS)
    for name in ("auto", "none", *FORMATS):
        assert ChatFormats(name).markers == ()
