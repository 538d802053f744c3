"""Which adapters are loaded, and which have slots: random histories agree with a simple model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor_service.adapters.registry import AdapterRegistry, LoadedAdapter
from executor_service.adapters.slots import AdapterSlots, NoFreeSlot
from executor_service.adapters.store import AdapterStore
from executor_service.adapters.weights import AdapterWeights, LowRankChange
from executor_service.contract.plan import Reason, RequestRefused

CONTENTS, NAMES, SLOTS, MAX_ADAPTERS, MAX_BYTES = 6, 5, 2, 4, 60


def adapter(content: int, size: int = 0) -> LoadedAdapter:
    """An adapter of 10 + content bytes, or of `size`."""
    factor = np.zeros((1, size or 10 + content), np.uint8)
    change = LowRankChange(0, "q_proj", factor, factor[:, :0])
    return LoadedAdapter(AdapterWeights(b"%d" % content, 4, 1.0, (change,)), content)


class Device:
    """What each slot holds; it only ever holds what was brought to it."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def load_adapter(self, slot: int, prepared: int) -> None:
        self.slots[slot] = prepared

    def unload_adapter(self, slot: int) -> None:
        del self.slots[slot]


class StoreMachine(RuleBasedStateMachine):
    """The model: contents by name, one per live sequence, and those with slots by their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.store = AdapterStore(AdapterRegistry(MAX_ADAPTERS, MAX_BYTES), AdapterSlots(SLOTS), self.device)
        self.names: dict[str, int] = {}
        self.sequences: list[tuple[int, LoadedAdapter]] = []
        self.recent: list[int] = []  # contents with a slot, least recently released first

    def live(self) -> set[int]:
        return {content for content, _ in self.sequences}

    def kept(self) -> set[int]:
        return set(self.names.values()) | self.live()

    @rule(name=st.integers(0, NAMES - 1), content=st.integers(0, CONTENTS - 1))
    def load(self, name: int, content: int) -> None:
        key = f"n{name}"
        size = sum(10 + one for one in self.kept() | {content})
        if key in self.names and self.names[key] != content:
            expected: Reason | None = Reason.ADAPTER_NAME
        elif key not in self.names and (len(self.names) == MAX_ADAPTERS or size > MAX_BYTES):
            expected = Reason.ADAPTER_MEMORY
        else:
            expected = None
        if expected is None:
            self.store.add(key, adapter(content))
            self.names[key] = content
            return
        with pytest.raises(RequestRefused) as caught:
            self.store.add(key, adapter(content))
        assert caught.value.refusal.reason is expected

    @rule(name=st.integers(0, NAMES - 1))
    def unload(self, name: int) -> None:
        assert self.store.remove(f"n{name}") == (self.names.pop(f"n{name}", None) is not None)
        self.recent = [content for content in self.recent if content in self.kept()]

    @rule(content=st.integers(0, CONTENTS - 1))
    def open(self, content: int) -> None:
        found = self.store.find(b"%d" % content)
        assert (found is not None) == (content in self.names.values())
        if found is None:
            return
        idle = [one for one in self.recent if one not in self.live()]
        has_room = content in self.recent or len(self.live()) < SLOTS
        assert self.store.has_room(found) == has_room
        if not has_room:
            with pytest.raises(NoFreeSlot):
                self.store.hold(found)
            return
        self.store.hold(found)
        if content not in self.recent:
            if len(self.recent) == SLOTS:
                self.recent.remove(idle[0])
            self.recent.append(content)
        self.sequences.append((content, found))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        content, held = data.draw(st.sampled_from(self.sequences))
        self.store.share(held)
        self.sequences.append((content, held))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        content, held = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.store.drop(held)
        if content not in self.live():
            self.recent.remove(content)
            if content in self.kept():
                self.recent.append(content)

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check(held for _, held in self.sequences)
        assert self.store.slots.used == len(self.live())
        assert self.store.registry.bytes == sum(10 + content for content in self.kept())

    @invariant()
    def every_sequence_finds_its_weights_in_its_slot(self) -> None:
        assert all(self.device.slots[held.slot] == content for content, held in self.sequences)
        assert sorted(self.device.slots.values()) == sorted(self.recent)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_cannot_be_is_refused_before_it_is_read() -> None:
    registry = AdapterRegistry(2, 100)
    registry.add("a", adapter(1, 50))
    registry.check_room("a", 50)
    for name, size, reason in (("a", 51, Reason.ADAPTER_NAME), ("b", 51, Reason.ADAPTER_MEMORY)):
        with pytest.raises(RequestRefused) as caught:
            registry.check_room(name, size)
        assert caught.value.refusal.reason is reason
    registry.check_room("b", 50)
