"""The handshake with an executor: state, properties, tokenizer and adapters if needed, session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline import errors
from paceline.aio.executor import ExecutorClient
from paceline.session import Session

from scheduler_service.link.codec.handshake import decode_facts, decode_heartbeat, decode_tokenizer
from scheduler_service.link.facts import ExecutorFacts, ExecutorPhase, Heartbeat
from scheduler_service.model import TokenizerSource

LABEL = "paceline scheduler"
"""Label of the scheduler's sessions, for the executor's operator."""


class RefusedExecutorError(Exception):
    """This executor must not or can't be used now; the message says why."""


class LoadingExecutorError(RefusedExecutorError):
    """The executor loads its model."""


class FailedExecutorError(RefusedExecutorError):
    """The executor can't load its model."""


class CompatibilityCheck(Protocol):
    """Decides, from what an executor says of itself, whether the scheduler may use it."""

    def check(self, facts: ExecutorFacts) -> bool:
        """Whether the executor's tokenizer is needed too. Raises RefusedExecutorError."""

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """Called with the tokenizer if `check` has asked for it. Raises RefusedExecutorError, ValueError."""

    async def prepare(self, client: ExecutorClient) -> None:
        """Load what requests may name. Raises RefusedExecutorError, PacelineError, ValueError."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """What a handshake brings: the session, and what the executor said of itself before."""

    session: Session
    facts: ExecutorFacts
    heartbeat: Heartbeat


async def perform_handshake(
    client: ExecutorClient,
    compatibility: CompatibilityCheck,
    *,
    replaces: Session | None,
    owner: str,
    lease_s: float,
    timeout_s: float,
) -> OpenedSession:
    """Check an executor and open a session on it. `timeout_s`: of each RPC.

    The executor releases the caches of the session `replaces`, if it is still the process that opened it,
    and those of the former session of `owner`, unless that is "".
    Raises RefusedExecutorError; ValueError for a malformed reply; `paceline.errors.PacelineError`.
    """
    heartbeat = decode_heartbeat(await client.get_status(timeout_s=timeout_s))
    match heartbeat.phase:
        case ExecutorPhase.LOADING:
            raise LoadingExecutorError(f"{heartbeat.loading or 'loading'} ({heartbeat.load_fraction:.0%})")
        case ExecutorPhase.FAILED:
            raise FailedExecutorError(heartbeat.loading)
        case ExecutorPhase.DRAINING:
            raise RefusedExecutorError("draining")
        case None:
            raise RefusedExecutorError("in an unknown state")
    facts = decode_facts(await client.get_info(timeout_s=timeout_s))
    if compatibility.check(facts):
        try:
            tokenizer = decode_tokenizer(await client.get_tokenizer(timeout_s=timeout_s))
        except errors.NotFound:
            tokenizer = TokenizerSource()  # the model has none: prompts are token ids
        await compatibility.learn(facts, tokenizer)
    await compatibility.prepare(client)
    session = await client.open_session(
        replaces=replaces.id if replaces is not None and replaces.epoch == facts.epoch else 0,
        lease_ms=round(lease_s * 1000),
        label=LABEL,
        owner=owner,
        timeout_s=timeout_s,
    )
    if session.epoch != facts.epoch:
        raise RefusedExecutorError("restarted during the handshake")
    if not session.id:  # id 0 is the default session, which all clients share
        raise RefusedExecutorError("it opened no session")
    await compatibility.prepare(client)  # nothing to do, unless more is wanted by now
    return OpenedSession(session, facts, heartbeat)
