"""Models under one roof, without processes: what the supervisor knows of its router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from paceline.cli.roof import ModelRoof, RoofConfig


def test_the_models_are_known_once_the_router_has_read_their_newest_line(tmp_path: Path) -> None:
    async def follow() -> None:
        roof = ModelRoof(RoofConfig((), "127.0.0.1", 0), tmp_path, lambda *_: None, lambda *_: None)
        listener = await asyncio.start_unix_server(roof.connected, roof.socket)
        reader, writer = await asyncio.open_unix_connection(roof.socket)
        known = asyncio.create_task(roof.known())
        assert await reader.readline() == b"[]\n"
        assert not known.done()
        writer.write(json.dumps({"read": 1}).encode() + b"\n")
        await known
        writer.close()
        listener.close()

    asyncio.run(follow())
