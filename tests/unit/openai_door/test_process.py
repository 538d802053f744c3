"""The gateway's process: which schedulers it uses."""

from __future__ import annotations

from typing import Any

import pytest
from paceline_openai import __main__ as process


class _Made(Exception):
    """The client was made."""


@pytest.mark.parametrize(("host", "directory"), [("127.0.0.1", "safe"), ("0.0.0.0", "off")])
def test_beyond_loopback_only_schedulers_that_refuse_strangers_are_used(
    host: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def client(*_: object, **options: Any) -> None:
        given.update(options)
        raise _Made

    monkeypatch.setattr(process, "Client", client)
    with pytest.raises(_Made):
        process.main(["--scheduler", "127.0.0.1:1", "--host", host, "--insecure"])
    assert given["directory"] == directory
