"""`rope_from_config`: rotary position embedding as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.backends.torch_backend.rope.spec import Linear, Llama3, RopeSpec, Scaling
from executor_service.files.fields import Fields, shown

_ORIGINAL = "original_max_position_embeddings"


def rope_from_config(f: Fields, context: int) -> RopeSpec:
    """What `rope_parameters` says, and the fields of older files. Raises ModelError.

    transformers 5 writes `rope_parameters`; before that, `rope_theta` stood beside `rope_scaling`, which
    wins. context: `max_position_embeddings`.
    """
    parameters = f.get("rope_parameters", {})
    key, given = "rope_parameters", parameters
    if scaling := f.get("rope_scaling", {}):
        key, given = "rope_scaling", scaling
    if not isinstance(given, Mapping):
        raise f.fault(f"{key} is not an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise f.fault(f"{key} with an object for each type of layer is not supported")
    r = Fields(given, f"{f.where}: {key}")
    beside = f.number("rope_theta", 10_000.0)
    theta = r.number("rope_theta", beside)
    for fields in (f, r):
        fields.only("partial_rotary_factor", (1,))
    kind = r.get("rope_type", r.get("type", "default"))
    # The length that the model was first trained for. transformers prefers the field beside the object.
    original = f.size(_ORIGINAL, r.size(_ORIGINAL, context))
    rope = RopeSpec(theta, _scaling(r, kind, original))
    r.refuse_unread(why=f"has no meaning for the rope type {shown(kind)}")
    return rope


def _scaling(r: Fields, kind: object, original_context: int) -> Scaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(r.number("factor"))
        case "llama3":
            return _llama3(r, original_context)
    raise r.fault(f"rope type {shown(kind)} is not supported, only linear and llama3")


def _llama3(r: Fields, original_context: int) -> Llama3:
    low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
    if not low < high:
        raise r.fault(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3(r.number("factor"), low, high, original_context)
