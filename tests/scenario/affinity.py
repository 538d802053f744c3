"""Which scheduler a step's request goes to: AFFINITY in scheduler.proto, as the Python SDK has it.

Its vectors are those of the contract: tests/unit/client/test_affinity.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from google.protobuf.json_format import ParseDict
from paceline.affinity import affinity_key, preference
from paceline.scheduler.v1 import scheduler_pb2 as pb


def first(step: Mapping[str, Any], addresses: Sequence[str]) -> int:
    """The index of the address at which a client without other calls begins with the step's request."""
    request = ParseDict(step["request"], pb.GenerateRequest())
    key = affinity_key(request, step.get("affinity_key", ""))
    return addresses.index(preference(key, addresses)[0])


def key_for(addresses: Sequence[str]) -> str:
    """A caller's own key whose requests try the addresses in this order."""
    any_prompt, wanted = pb.GenerateRequest(), list(addresses)
    keys = map(str, count())
    return next(one for one in keys if preference(affinity_key(any_prompt, one), wanted) == wanted)
