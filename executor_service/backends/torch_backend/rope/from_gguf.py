"""`rope_from_gguf`: rotary position embedding as a GGUF file's metadata say it."""

from __future__ import annotations

from executor_service.backends.torch_backend.rope.spec import Linear, RopeSpec
from executor_service.files.fields import Fields, shown


def rope_from_gguf(f: Fields, prefix: str) -> RopeSpec:
    """What the keys under `prefix`, as in "llama.rope.", say. Raises ModelError."""
    theta, factor = f.number(f"{prefix}freq_base", 10_000.0), f.number(f"{prefix}scaling.factor", 1.0)
    kind = f.get(f"{prefix}scaling.type", "linear")  # what llama.cpp takes a factor alone for
    if kind not in ("none", "linear"):
        raise f.fault(f"{prefix}scaling.type {shown(kind)} is not supported, only none and linear")
    return RopeSpec(theta) if kind == "none" or factor == 1.0 else RopeSpec(theta, Linear(factor))
