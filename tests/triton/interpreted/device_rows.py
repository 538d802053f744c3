"""Rows of a few sequences of a tiny model, for a runner that the test calls itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.torch_backend.cuda.device_runner import DeviceRunner
from executor_service.contract.plan import OutputMode, Sampling
from tests.unit.executor.rows import make_row

PAGES, PAGE = 64, 16
TABLES = {name: list(range(1 + 8 * i, 9 + 8 * i)) for i, name in enumerate("abcdefg")}
TOKENS = {name: np.random.default_rng(i).integers(0, 250, 120).tolist() for i, name in enumerate("abcdefg")}
DRAWN = Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=7)


def row(
    name: str,
    start: int,
    count: int,
    outputs: int = 1,
    sampling: Sampling = DRAWN,
    output: OutputMode = OutputMode.SAMPLE,
) -> ForwardRow:
    return make_row(
        TOKENS[name][: start + count], TABLES[name],
        start=start, outputs=outputs, output=output, sampling=sampling, top_k=3,
    )  # fmt: skip


def fill(runner: DeviceRunner, **lengths: int) -> None:
    for name, length in lengths.items():
        runner.launch([row(name, 0, length, outputs=0, output=OutputMode.NONE)]).outputs()


def following(name: str, start: int, row_before: int, sampling: Sampling = DRAWN) -> ForwardRow:
    """A row as the engine has it while its token is not known."""
    known, unknown = row(name, start, 1, sampling=sampling), np.full(1, -1, np.int32)
    return replace(known, tokens=unknown, history=np.append(known.history[:-1], unknown), follows=row_before)


def same(ours: Sequence[RowOutput], theirs: Sequence[RowOutput], atol: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.finite == b.finite
        for name in ("tokens", "top_ids"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            assert x is None or x.tolist() == y.tolist(), name
        for name in ("logprobs", "top_logprobs", "logits"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            if x is not None:
                np.testing.assert_allclose(x, y, atol=atol)
