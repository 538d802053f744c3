"""Which layers of a Hugging Face model see only a window of tokens, by its config.json.

Source: the configurations and models of transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_service.backends.torch_backend.files.architecture.rope.spec import RopeSpec
from executor_service.backends.torch_backend.files.architecture.spec import WindowSpec
from executor_service.files.fields import Fields, shown

_FULL, _SLIDING = "full_attention", "sliding_attention"
_FULL_BEFORE = "attention"  # in files from before transformers 5 (Granite 4)


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How the models of an architecture read `sliding_window`, and which layers have it."""

    size: int | None  # where config.json lacks the field; null there means no window
    flagged: bool = False  # there is none without `use_sliding_window`
    listed: bool = False  # `layer_types` names the layers; the fields below matter only without it
    first: int | None = None  # default of `max_window_layers`, the first layer; None: not read, layer 0
    last: int | None = None  # default of `max_window_layers`, the number of layers that may have a window
    period: int | None = None  # default of `sliding_window_pattern`: one layer of each `period` sees all
    rope_theta: float | None = None  # default of `rope_local_base_freq`; None: the rope of other layers
    only_rotated: bool = False  # beside layers with a window, those without one are not rotated

    @property
    def matters(self) -> bool:
        """Whether layers with a window differ from others even where it is as long as the context."""
        return self.rope_theta is not None or self.only_rotated


def window_from_config(
    f: Fields, rule: WindowRule | None, layers: int, context: int, rope: RopeSpec
) -> WindowSpec | None:
    """The window; None if it is as long as the context and its layers differ in nothing else.

    rule: None where an architecture has none. rope: of the layers with the window. Raises ModelError, also
    where `layer_types` says otherwise than the other fields.
    """
    f.ignore("use_sliding_window", "sliding_window", "max_window_layers")  # read where a window is in use
    kinds = _kinds(f, layers)
    sliding = frozenset(i for i, kind in enumerate(kinds or ()) if kind == _SLIDING)
    size, chosen = None, frozenset[int]()
    if rule is None:
        f.only("use_sliding_window", (False,))
        off = f.get("use_sliding_window", None) is not None
        if not off and f.size("sliding_window", context) < context:
            raise f.fault("sliding_window is not supported for this model_type")
    else:
        size = _size(f, rule)
        f.only("sliding_window_size", (f.values.get("sliding_window", rule.size),))  # Gemma 2 says it twice
        chosen = sliding if kinds is not None and rule.listed else frozenset(_layers(f, rule, layers))
    if size is None:
        chosen = frozenset()
    if kinds is not None and chosen != sliding:
        raise f.fault(f"layer_types is {shown(list(kinds))}, the other fields about windows say otherwise")
    if rule is None or size is None or not chosen or (size >= context and not rule.matters):
        return None
    return WindowSpec(size, chosen, rope)


def _size(f: Fields, rule: WindowRule) -> int | None:
    used = f.flag("use_sliding_window", default=False) if rule.flagged else True
    size = f.values.get("sliding_window", rule.size)
    if used and rule.flagged and size == 0:  # what transformers writes for a window that is not in use
        raise f.fault("sliding_window is 0, but use_sliding_window is set")
    return f.size("sliding_window", size) if used and size is not None else None


def _layers(f: Fields, rule: WindowRule, layers: int) -> list[int]:
    first = 0 if rule.first is None else f.get("max_window_layers", rule.first)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise f.fault(f"max_window_layers is {shown(first)}, expected a number of layers")
    if rule.period is None:
        return [*range(first, layers)]
    if rule.last is not None:
        layers = min(layers, f.count("max_window_layers", rule.last))
    period = f.size("sliding_window_pattern", rule.period)
    return [i for i in range(first, layers) if (i + 1) % period]


def _kinds(f: Fields, layers: int) -> Sequence[str] | None:
    given = f.get("layer_types", None)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) < layers:
        raise f.fault(f"layer_types is {shown(given)}, expected a list of {layers} types, num_hidden_layers")
    given = [_FULL if kind == _FULL_BEFORE else kind for kind in given]
    unknown = [kind for kind in given if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise f.fault(f"layer_types: {shown(unknown[0])} is not supported, only {_FULL} and {_SLIDING}")
    return given[:layers]
