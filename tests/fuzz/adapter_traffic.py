"""Hostile requests of the RPCs for adapters. A scheduler's and an executor's have the same fields."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message

from tests.fuzz.messages import disturb
from tests.support.adapter_files import factors, write_adapter

RPCS = ("LoadAdapter",) * 5 + ("UnloadAdapter",) * 2 + ("ListAdapters",)
GOOD = ("a", "b", "c")
"""Names of adapters that can be loaded, and their directories."""
_NAMES = (*GOOD, *GOOD, *GOOD, "d", "oracle", "", "-", "x" * 129, "é", "a b")
_OUTSIDE = ("..", "../outside", "/etc", "a/../..", "link")
_PATHS = ("", "", "", *GOOD, *_OUTSIDE, "pickle", "nan", "torn", "missing", "a/", "x" * 5000, "a\0b")


def write_directory(directory: Path) -> Path:
    """Adapters that can be loaded, and what can't be."""
    for seed, name in enumerate(GOOD):
        write_adapter(directory / name, seed=seed)
    weights = "adapter_model.safetensors"
    pickle = write_adapter(directory / "pickle")
    (pickle / weights).rename(pickle / "adapter_model.bin")
    tensors = factors()
    next(iter(tensors.values()))[0, 0] = np.nan
    write_adapter(directory / "nan", tensors)
    torn = write_adapter(directory / "torn") / weights
    torn.write_bytes(torn.read_bytes()[:-4])
    (directory / "link").symlink_to(write_adapter(directory.parent / "outside"))
    return directory


def request(rng: random.Random, messages: Any) -> tuple[str, Message]:
    """One request and its RPC. `messages`: the module of the contract."""
    name = rng.choice(RPCS)
    message: Any = getattr(messages, f"{name}Request")()
    if name != "ListAdapters":
        message.name = rng.choice(_NAMES)
    if name == "LoadAdapter":
        message.path = rng.choice(_PATHS)
    disturb(rng, message, rng.choice([0.0, 0.0, 0.1, 0.5]))
    return name, message
