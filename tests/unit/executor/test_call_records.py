"""What Python writes for a kernel is what the kernel reads; damaged calls are refused before it reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from numba import njit

from executor_service.backends.torch_backend.cpu.gemm.bias import AddBias
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.records import (
    Address,
    Kind,
    Record,
    address_of,
    reader,
    size_of,
    words_of,
    words_of_field,
)
from executor_service.backends.torch_backend.cpu.rowwise.norm import NormRows
from executor_service.backends.torch_backend.cpu.rowwise.sampling import TakeLargest
from executor_service.backends.torch_backend.cpu.threads import thread_pool
from executor_service.backends.torch_backend.cpu.threads.call_table import CallTable
from executor_service.backends.torch_backend.cpu.threads.dispatch import KERNELS, Header
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool

POOL = ThreadPool(2)
NOTHING_COMPILED = np.zeros(len(KERNELS), np.int64)


class Inner(NamedTuple):
    at: Address
    length: int


class Before(NamedTuple):
    rows: int
    inner: Inner
    eps: float
    add: bool


class Reordered(NamedTuple):
    add: bool
    eps: float
    inner: Inner
    rows: int


class Extended(NamedTuple):
    rows: int
    stride: int
    inner: Inner
    eps: float
    extra: Inner
    add: bool


VALUES = {
    "rows": -5, "inner": Inner(Address(1 << 62), 7), "eps": 0.375, "add": True,
    "stride": 11, "extra": Inner(Address(13), 17),
}  # fmt: skip


def read_back(kind: Kind, words: list[int]) -> Record:
    """What a kernel reads from these words."""
    read = reader(kind)

    @njit
    def kernel(address: int) -> Any:
        return read(address)

    memory = np.array(words, np.int64)
    record: Record = kernel(address_of(memory))
    return record


def sample(kind: Any, numbers: Iterator[int]) -> Record:
    """A record whose numbers all differ."""
    makers: dict[Any, Any] = {
        bool: lambda: True,
        float: lambda: next(numbers) / 8,
        int: lambda: next(numbers),
    }
    hints = [getattr(hint, "__supertype__", hint) for hint in get_type_hints(kind).values()]
    record: Record = kind(*(makers[hint]() if hint in makers else sample(hint, numbers) for hint in hints))
    return record


@pytest.mark.parametrize("kind", [Before, Reordered, Extended])
def test_a_field_that_is_added_or_moved_moves_in_writer_and_reader(kind: Any) -> None:
    record = kind(**{name: VALUES[name] for name in kind._fields})
    words = words_of(record)
    assert len(words) == size_of(kind)
    assert read_back(kind, words) == record


def test_the_places_of_fields_follow_the_declaration() -> None:
    places = [words_of_field(kind, "inner") for kind in (Before, Reordered, Extended)]
    assert places == [range(1, 3), range(2, 4), range(2, 4)]
    assert words_of(Before(3, Inner(Address(5), 7), 0.0, False)) == [3, 5, 7, 0, 0]
    with pytest.raises(KeyError, match="no field 'stride'"):
        words_of_field(Before, "stride")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.__name__)
def test_each_kind_of_call_is_read_as_it_was_written(kernel: Kernel) -> None:
    record = sample(kernel.declaration, count(1))
    assert read_back(kernel.declaration, words_of(record)) == record


def test_a_value_of_another_type_is_refused() -> None:
    good: Any = Before(3, Inner(Address(5), 7), 0.0, False)
    for bad in (good._replace(rows=1.5), good._replace(rows=None), good._replace(inner=(5, 7))):
        with pytest.raises(TypeError):
            words_of(bad)
    with pytest.raises(OverflowError):
        CallTable([AddBias(1 << 63, Address(0), Address(0), 1, False)])


def test_a_declaration_with_a_field_of_another_type_is_refused() -> None:
    class Wrong(NamedTuple):
        name: str

    with pytest.raises(TypeError, match="name: "):
        size_of(Wrong)


def test_only_what_a_kernel_computes_is_a_call() -> None:
    with pytest.raises(KeyError):
        CallTable([Inner(Address(0), 0)])


def damaged(what: str, out: torch.Tensor) -> CallTable:
    """A good call that writes to `out`, then one whose addresses no kernel survives."""
    bias = torch.ones(len(out))
    good = AddBias(1, address_of(bias), address_of(out), len(out), False)
    table = CallTable([good, AddBias(1, Address(8), Address(8), 1 << 20, False)])
    if what == "width":
        table.words = np.ascontiguousarray(table.words[:, :-1])
    elif what == "size":
        table.words[1, words_of_field(Header, "size")] -= 1
    else:
        table.words[1, words_of_field(Header, "kind")] = len(KERNELS) if what == "kind" else -1
    return table


@pytest.mark.parametrize("what", ["width", "size", "kind", "negative kind"])
def test_a_damaged_table_is_refused_before_any_of_its_calls_is_computed(what: str) -> None:
    out = torch.zeros(4)
    with POOL.step(), pytest.raises(ValueError, match="call"):
        POOL.run_table(damaged(what, out))
    assert not out.any()


def test_a_call_whose_kernel_is_not_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(4)
    table = CallTable([AddBias(1, address_of(out), address_of(out), 4, False)])
    with monkeypatch.context() as patch:
        patch.setattr(thread_pool, "FUNCTIONS", address_of(NOTHING_COMPILED))
        with POOL.step(), pytest.raises(ValueError, match="not compiled"):
            POOL.run_table(table)


def test_a_field_is_set_in_all_calls_that_have_it_and_in_no_other() -> None:
    none = Address(0)
    norm, largest = NormRows(1, none, 3, none, none, 3, 3, 0.5, add=False), TakeLargest(1, 9, none, none)
    table = CallTable([norm, largest, norm])
    n = table.field("n")
    n.set([7])
    n.set_each(np.array([[5], [6]]))
    n.set([7])
    n.set_each(np.array([[5], [6]]))
    table.field("vocabulary").set([8])
    table.field("rows").set([2])
    expected = [
        norm._replace(rows=2, n=5),
        largest._replace(rows=2, vocabulary=8),
        norm._replace(rows=2, n=6),
    ]
    assert np.array_equal(table.words, CallTable(expected).words)
