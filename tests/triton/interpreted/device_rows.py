"""Rows of a few sequences of a tiny model, for a runner that the test calls itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
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
        runner.launch(ForwardRows([row(name, 0, length, outputs=0, output=OutputMode.NONE)])).outputs()


def following(name: str, start: int, row_before: int, sampling: Sampling = DRAWN) -> ForwardRow:
    """A row as the engine has it while its token is not known."""
    known, unknown = row(name, start, 1, sampling=sampling), np.full(1, -1, np.int32)
    return replace(known, tokens=unknown, history=np.append(known.history[:-1], unknown), follows=row_before)


def masked(plain: ForwardRow, *allowed: range) -> ForwardRow:
    """The row with a mask for each output; the vocabulary has 320 tokens."""
    bits = np.zeros((len(allowed), 320), np.uint8)
    for position, tokens in enumerate(allowed):
        bits[position, tokens] = 1
    return replace(plain, masks=np.packbits(bits, axis=-1, bitorder="little"))


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


MIXED = [
    [row("a", 0, 9), row("b", 0, 3, sampling=Sampling()), row("c", 0, 2, outputs=0, output=OutputMode.NONE)],
    [
        row("a", 9, 1),
        row("b", 3, 5, outputs=5),
        row("c", 2, 9, outputs=3, output=OutputMode.FULL),
        row("d", 0, 4, outputs=2, output=OutputMode.TOP_K),
    ],
    [
        row("a", 10, 1, sampling=Sampling(temperature=0.7, logprobs=2, seed=3)),
        row("b", 8, 2, outputs=2, sampling=replace(DRAWN, repetition_penalty=1.3)),
        row("d", 4, 1, sampling=Sampling(logit_bias=((5, 50.0),))),
        row("c", 11, 1, sampling=Sampling(min_p=0.2, temperature=1.0, seed=9)),
    ],
    [
        masked(row("a", 11, 1), range(3, 5)),
        row("b", 10, 1),
        masked(row("d", 5, 3, outputs=3), range(300, 320), range(7, 8), range(99)),
    ],
]
"""Steps of rows of every kind, one after another."""
