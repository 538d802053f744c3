"""The real executor engine with a model-free backend, in process, behind both services' codecs."""

from __future__ import annotations

import hashlib

import numpy as np
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.base import AdapterBackend, Backend
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.backends.reference.paged_attention import PagedAttentionBackend, PagedAttentionConfig
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Opening, Release, Sampling, StepPlan
from executor_service.grammar.source import GrammarSource
from executor_service.rpc.codec.results import encode_result
from executor_service.rpc.codec.rows import UNIFIED
from executor_service.rpc.codec.steps import decode_step
from executor_service.steps.engine import Engine
from scheduler_service.core.request import OutputGrammar
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from scheduler_service.link.codec.steps import decode_result, encode_step
from scheduler_service.link.facts import Bounds
from tests.support.engine_steps import BegunStep, begin, execute
from tests.unit.executor.deferred import DeferredAttention, DeferredOracle
from tests.unit.executor.table_grammar import late, loops, turns

VOCABULARY = 48
EPOCH = 77
LOOPS = OutputGrammar("regex", "loops")
"""A grammar of choices and forced tokens in turn; its text may end by token 0."""
TURNS = OutputGrammar("regex", "turns")
"""A grammar in which each choice of two forces one token or six; its text never ends."""
LATE = OutputGrammar("regex", "late")
"""A grammar that forces nothing among the first 60 tokens, and then everything."""
ADAPTERS = tuple(hashlib.sha256(bytes([number])).digest() for number in range(5))
"""Fingerprints of adapters that the target has loaded; the last one is used by other clients alone."""


def oracle(context_length: int, agreement: float = 1.0, vocabulary: int = VOCABULARY) -> Backend:
    """The oracle, or a draft that has its logits at a share `agreement` of the positions."""
    return OracleBackend(
        OracleSettings(vocab_size=vocabulary, context_length=context_length, draft_agreement=agreement)
    )


def paged_attention(context_length: int, head_dim: int = 24) -> Backend:
    """The reference model; one with fewer dimensions tells fewer tokens apart: a draft of it."""
    return PagedAttentionBackend(PagedAttentionConfig(VOCABULARY, context_length, 2, 2, head_dim))


def late_oracle(context_length: int) -> Backend:
    """The oracle as a device that is as late as it may be."""
    return DeferredOracle(OracleSettings(vocab_size=VOCABULARY, context_length=context_length))


def late_paged_attention(context_length: int) -> Backend:
    """The reference model, likewise."""
    return DeferredAttention(PagedAttentionConfig(VOCABULARY, context_length, 2, 2, 24))


class EngineExecutor:
    """One engine; `restart` is a scheduler that comes back to it with a new session."""

    def __init__(
        self, capacity: Capacity, backend: Backend | None = None, token_s: float | None = None
    ) -> None:
        """`backend`: where it is late, steps that are sent are begun, two at a time.

        `token_s`: what it takes to read a token of an output through a grammar; None: no matter what.
        """
        self.capacity = capacity
        backend = backend or oracle(capacity.context_length)
        backend.allocate(capacity.total_pages + 1, capacity.page_size)
        self._limits = Limits(
            vocab_size=backend.info.vocab_size,
            context_length=capacity.context_length,
            page_size=capacity.page_size,
            total_pages=capacity.total_pages,
            max_sequences=capacity.max_sequences,
            max_rows=capacity.max_rows,
            max_step_tokens=capacity.max_step_tokens,
            max_drafts=capacity.max_drafts,
            max_steps=capacity.max_steps,
            max_grammar_bytes=100,
            max_adapters=len(ADAPTERS),
            max_adapter_slots=capacity.max_adapter_slots,
            max_adapter_bytes=1,
            max_full_logits_bytes=capacity.max_output_bytes,
            can_score=True,
            hidden_size=backend.info.hidden_size,
        )
        self._grammars = {
            GrammarSource("regex", LOOPS.text): loops(end=0, vocabulary=backend.info.vocab_size),
            GrammarSource("regex", TURNS.text): turns(end=0, vocabulary=backend.info.vocab_size),
            GrammarSource("regex", LATE.text): late(end=0, vocabulary=backend.info.vocab_size),
        }
        replay_clock = None if token_s is None else lambda: token_s * self._consumed
        self.engine = Engine(backend, self._limits, EPOCH, clock=lambda: 0.0, replay_clock=replay_clock)
        if capacity.max_adapter_slots:
            assert isinstance(backend, AdapterBackend)
            for fingerprint in ADAPTERS:
                weights = AdapterWeights(fingerprint, 1, 1.0, ())
                self.engine.store.adapters.add(
                    fingerprint.hex(), LoadedAdapter(weights, backend.prepare_adapter(weights))
                )
        self._session_id = 0
        self._foreign_id = 1
        self.restart()

    @property
    def _consumed(self) -> int:
        return sum(grammar.consumed for grammar in self._grammars.values())

    def restart(self) -> None:
        """A new session fences the old one; the prefix cache stays warm."""
        self._session_id = self.engine.open_session(self._session_id, 0, "test").id
        self._step_id = 0
        self._begun: dict[int, tuple[StepPlan, BegunStep]] = {}  # sent steps by their numbers

    def send(self, plan: PlannedStep) -> None:
        """Begin one step over the wire's bytes."""
        self._step_id += 1
        header = pb.StepHeader(session_id=self._session_id, step_id=self._step_id, epoch=EPOCH)
        wire = encode_step(plan, header).SerializeToString()
        step_plan = decode_step(pb.Step.FromString(wire), self._limits, UNIFIED, self._grammars)
        self._begun[plan.number] = step_plan, begin(self.engine, step_plan)

    def execute(self, plan: PlannedStep) -> StepAnswer:
        """Finish a step, which is begun now if it was not sent."""
        if plan.number not in self._begun:
            self.send(plan)
        step_plan, step = self._begun.pop(plan.number)
        reply = pb.StepResult()
        encode_result(reply, step.finish(), step_plan, EPOCH)
        limits = self._limits
        bounds = Bounds(limits.vocab_size, limits.context_length, limits.total_pages, limits.hidden_size)
        return decode_result(plan, pb.StepResult.FromString(reply.SerializeToString()), bounds)

    def squeeze(self, tokens: int, adapter: bytes = b"") -> None:
        """Another client takes pages for so many tokens, or gives them back: its last squeeze ends.

        With an adapter it takes a slot too.
        """
        self._foreign_id += 1
        opening = Opening(
            self._foreign_id, np.zeros(tokens, np.int32), tokens, 0, Sampling(), adapter=adapter
        )
        openings = (opening,) if tokens else ()
        ops = (Release((self._foreign_id - 1,)),)
        execute(self.engine, StepPlan(session_id=0, ops=ops, openings=openings))

    def check(self) -> None:
        """free + cached + owned = total, page by page."""
        self.engine.store.check()

    @property
    def owned_pages(self) -> int:
        """Pages that live caches hold."""
        return self.engine.store.pages.owned
