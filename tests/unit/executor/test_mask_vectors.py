"""The stop mask, and when it gives way: these vectors are the ones in executor.proto."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from executor_service.backends.numpy_sampler import choose
from executor_service.contract.plan import Sampling

PROTO = Path(__file__).parents[3] / "protos/paceline/executor/v1/executor.proto"
VECTOR = re.compile(r"^//   (\[[\d, ]*\]) +(\d) +(\{.*?\}) +(\d)(?:  \(.*\))?$", re.MULTILINE)
VECTORS = VECTOR.findall(PROTO.read_text())


def test_the_proto_has_vectors() -> None:
    assert len(VECTORS) == 5


@pytest.mark.parametrize(("stops", "min_tokens", "bias", "token"), VECTORS)
def test_the_sampler_gives_the_vectors_token(stops: str, min_tokens: str, bias: str, token: str) -> None:
    sampling = Sampling(
        stop_token_ids=tuple(ast.literal_eval(stops)),
        min_tokens=int(min_tokens),
        logit_bias=tuple(ast.literal_eval(bias).items()),
    )
    logits = np.array([1, 3, 2, 0], np.float32)
    assert choose(logits, np.array([2], np.int32), 1, sampling) == int(token)
