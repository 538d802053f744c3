"""Checks a service step by step: connection, protocol, TLS, token, state, and a request for one token."""

from __future__ import annotations

import enum
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import grpc
from google.protobuf.message import DecodeError

from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.cli.wire import Handshake, Speaks, Trust, shake_hands, what_speaks
from paceline.client import Client
from paceline.executor.v1 import executor_pb2
from paceline.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline.types import ExecutorStatus, Status


class Verdict(enum.Enum):
    """The kinds of problems that `diagnose` finds."""

    OK = "ok"
    NO_SUCH_HOST = "no such host"
    UNREACHABLE = "unreachable"
    NOBODY = "nobody listens"
    FROZEN = "frozen"
    CLOSES = "closes connections"
    NOT_GRPC = "not gRPC"
    NEEDS_TLS = "TLS needed"
    NO_TLS = "no TLS there"
    UNKNOWN_AUTHORITY = "unknown authority"
    OTHER_NAME = "another name"
    EXPIRED = "certificate expired"
    CLIENT_CERTIFICATE = "client certificate refused"
    TLS_FAILED = "TLS failed"
    TOKEN_MISSING = "token missing"
    TOKEN_WRONG = "token wrong"
    EXECUTOR = "an executor"
    NOT_PACELINE = "not Paceline"
    VERSION = "another version"
    LOADING = "loading"
    DRAINING = "draining"
    NO_EXECUTOR = "no executor"
    NOT_SERVING = "not serving"
    BUSY = "busy"
    SLOW = "slow"
    FAILED = "failed"


ADVICE = {
    Verdict.OK: "nothing to do",
    Verdict.NO_SUCH_HOST: "check the host's name",
    Verdict.UNREACHABLE: "check the address, the network and the firewall between",
    Verdict.NOBODY: "start it with `paceline serve`, or name its host and port with --address",
    Verdict.FROZEN: "its process stands still: is it stopped? Else kill it; `paceline serve` replaces it",
    Verdict.CLOSES: "it has its maximum of connections (half its `ulimit -n`), or another program listens",
    Verdict.NOT_GRPC: "another program listens there: check the port",
    Verdict.NEEDS_TLS: "give its authority's certificate: `paceline --tls-ca FILE`, or PACELINE_TLS_CA",
    Verdict.NO_TLS: "leave out --tls-ca and PACELINE_TLS_CA, or serve with -S tls-cert=FILE -S tls-key=FILE",
    Verdict.UNKNOWN_AUTHORITY: "--tls-ca must name the authority that signed its certificate",
    Verdict.OTHER_NAME: "reach it by a name that its certificate has, or give it one that has this name",
    Verdict.EXPIRED: "renew its certificate, or set the clock of this machine",
    Verdict.CLIENT_CERTIFICATE: "give one that it trusts: `paceline --tls-cert FILE --tls-key FILE`",
    Verdict.TLS_FAILED: "check the files of --tls-ca, --tls-cert and --tls-key, and its own",
    Verdict.TOKEN_MISSING: "set PACELINE_TOKEN",
    Verdict.TOKEN_WRONG: "PACELINE_TOKEN holds a token that it does not know: ask who runs it for yours",
    Verdict.EXECUTOR: "requests go to a scheduler: name the address of the one in front of it",
    Verdict.NOT_PACELINE: "another gRPC service listens there: check the port",
    Verdict.VERSION: "install the same version of paceline on both sides",
    Verdict.LOADING: "wait until the model is loaded",
    Verdict.DRAINING: "it takes no more requests: send them elsewhere, or start it again",
    Verdict.NO_EXECUTOR: "start its executor, or look at why it does not get through to it",
    Verdict.NOT_SERVING: "look at its log, and at its executor's",
    Verdict.BUSY: "try again later, or give it less to do",
    Verdict.SLOW: "it computes, but not this in time: see `paceline status`, or try a longer --timeout-s",
    Verdict.FAILED: "look at its log",
}
"""What to do about each problem, in one line."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The first problem found, or OK."""

    verdict: Verdict
    detail: str  # what led to the verdict
    note: str = ""  # a further observation, such as different versions

    @property
    def advice(self) -> str:
        """What to do."""
        return ADVICE[self.verdict]


def diagnose(address: str, security: Security, timeout_s: float, model: str = "") -> Diagnosis:
    """The first problem on the way from a connection to an answered request; OK: the request was answered.

    Checks in order: connection, protocol, TLS, token, state, and a request for one token.

    `model`: of several models at the address the one to ask, which is loaded for that.
    `timeout_s` is the limit of each connection and each call. Raises OSError, before it connects, for a
    file of `security` that can't be read or is not a certificate or key in PEM.
    """
    security.check_files()
    return connection_problem(address, security, timeout_s) or _service_verdict(
        address, security, timeout_s, model
    )


def connection_problem(address: str, security: Security, timeout_s: float) -> Diagnosis | None:
    """The first problem of the connection, the protocol or TLS; None: gRPC can connect."""
    try:
        return _port_problem(address, security, timeout_s)
    except socket.gaierror as error:
        return Diagnosis(Verdict.NO_SUCH_HOST, f"{address}: {error.strerror}")
    except (ConnectionRefusedError, FileNotFoundError) as error:
        return Diagnosis(Verdict.NOBODY, f"{address} ({error.strerror})")
    except TimeoutError:
        return Diagnosis(Verdict.UNREACHABLE, f"no connection to {address} within {timeout_s:g} s")
    except OSError as error:
        return Diagnosis(Verdict.UNREACHABLE, f"{address}: {error.strerror or error}")


def _port_problem(address: str, security: Security, timeout_s: float) -> Diagnosis | None:
    """As `connection_problem`. Raises OSError if there is no connection."""
    tls = security.ca_file is not None
    match what_speaks(address, timeout_s):
        case Speaks.NOTHING:
            return Diagnosis(
                Verdict.FROZEN, f"{address} accepts connections, and sends nothing for {timeout_s:g} s"
            )
        case Speaks.CLOSES:
            return Diagnosis(
                Verdict.CLOSES, f"{address} accepts connections, and closes them without sending a byte"
            )
        case Speaks.OTHER:
            return Diagnosis(Verdict.NOT_GRPC, f"{address} speaks neither HTTP/2 nor TLS")
        case Speaks.TLS if not tls:
            return Diagnosis(Verdict.NEEDS_TLS, f"{address} speaks TLS, and this client does not")
        case Speaks.HTTP2 if tls:
            return Diagnosis(Verdict.NO_TLS, f"{address} speaks plaintext, and this client TLS")
    return _trust_problem(shake_hands(address, security, timeout_s)) if tls else None


def _trust_problem(handshake: Handshake) -> Diagnosis | None:
    """The diagnosis of a TLS handshake; None: it succeeded."""
    verdicts = {
        Trust.UNKNOWN_AUTHORITY: Verdict.UNKNOWN_AUTHORITY,
        Trust.OTHER_NAME: Verdict.OTHER_NAME,
        Trust.EXPIRED: Verdict.EXPIRED,
        Trust.CLIENT_CERTIFICATE: Verdict.CLIENT_CERTIFICATE,
        Trust.FAILED: Verdict.TLS_FAILED,
    }
    if handshake.trust is Trust.GOOD:
        return None
    return Diagnosis(verdicts[handshake.trust], handshake.detail)


def _service_verdict(address: str, security: Security, timeout_s: float, model: str) -> Diagnosis:
    """The first problem of the service at a port that speaks gRPC; else the verdict on a request."""
    with Client(address, security=security, failover_timeout_s=0, directory="off", model=model) as client:
        try:
            status = client.status(timeout_s=timeout_s)
        except errors.Unauthenticated as error:
            if error.code is grpc.StatusCode.UNAUTHENTICATED:
                return _token_problem(security, error)
            # PERMISSION_DENIED: the caller may not read the status.
            return _request_verdict(client, None, timeout_s)
        except errors.Unsupported:
            return _verdict_without_scheduler(address, security, timeout_s)
        except DecodeError as error:
            return Diagnosis(Verdict.VERSION, f"its status can't be read: {error}")
        except errors.PacelineError as error:
            if error.reason == "NOT_READY":  # one of several models, which a request has loaded
                return _request_verdict(client, None, timeout_s)
            return _status_problem(error, timeout_s)
        return _state_problem(client, status, timeout_s) or _request_verdict(client, status, timeout_s)


def _status_problem(error: errors.PacelineError, timeout_s: float) -> Diagnosis:
    """The diagnosis of a service that answered GetStatus with `error`, which is not about a token."""
    if isinstance(error, errors.DeadlineExceeded):
        return Diagnosis(
            Verdict.FROZEN, f"its port answers, and the service says nothing for {timeout_s:g} s"
        )
    unreadable = "eserializ" in error.message or "parse" in error.message
    if unreadable and not isinstance(error, errors.Unavailable):
        return Diagnosis(Verdict.VERSION, f"its status can't be read: {error.message}")
    return Diagnosis(Verdict.FAILED, error.message)


def _token_problem(security: Security, error: errors.PacelineError) -> Diagnosis:
    """The diagnosis of a call that was refused with `error` for its token or the lack of one."""
    verdict = Verdict.TOKEN_WRONG if security.token else Verdict.TOKEN_MISSING
    return Diagnosis(verdict, error.message)


def _verdict_without_scheduler(address: str, security: Security, timeout_s: float) -> Diagnosis:
    """The verdict on a gRPC service that has no scheduler's methods: an executor, or not Paceline."""
    with open_channel(address, Link.PRIVATE, security) as channel:
        stub = ExecutorServiceStub(channel)
        try:
            reply = stub.GetStatus(
                executor_pb2.GetStatusRequest(), timeout=timeout_s, metadata=security.metadata
            )
        except grpc.RpcError as raised:
            error = errors.from_rpc(raised)
            if isinstance(error, errors.Unauthenticated):
                return _token_problem(security, error)
            if not isinstance(error, errors.Unsupported):
                return _status_problem(error, timeout_s)
            return Diagnosis(Verdict.NOT_PACELINE, f"{address} has neither a scheduler nor an executor")
    states = {
        executor_pb2.EXECUTOR_STATE_LOADING: "loading",
        executor_pb2.EXECUTOR_STATE_SERVING: "serving",
        executor_pb2.EXECUTOR_STATE_DRAINING: "draining: it opens no more sequences",
    }
    return Diagnosis(
        Verdict.EXECUTOR, f"{address} is an executor, {states.get(reply.state, 'in an unknown state')}"
    )


def _state_problem(client: Client, status: Status, timeout_s: float) -> Diagnosis | None:
    """The problem that the scheduler's status shows; None: it can answer requests."""
    if status.state == "draining":
        return Diagnosis(Verdict.DRAINING, "the scheduler drains")
    if status.state not in ("loading", "no_executor"):
        return None
    workers: list[ExecutorStatus] = []
    with suppress(errors.PacelineError):  # only administrators may list executors
        workers = [one for one in client.executors(timeout_s=timeout_s) if not one.draft]
    details = "; ".join(f"{one.address}: {one.detail or 'ready'}" for one in workers) or "none is ready"
    if workers and all(one.draining or "drain" in one.detail for one in workers):
        return Diagnosis(Verdict.DRAINING, f"all executors drain ({details})")
    loads = any("%)" in one.detail for one in workers)  # the progress of loading, as the executor reports it
    return Diagnosis(Verdict.LOADING if loads else Verdict.NO_EXECUTOR, details)


def _request_verdict(client: Client, status: Status | None, timeout_s: float) -> Diagnosis:
    """The verdict on a request for one token, the only proof that requests are answered."""
    note = ""
    try:
        info = client.model_info(timeout_s=timeout_s)
        if _release(info.version) != _release(_our_version()):
            note = f"it has version {info.version or 'unknown'}, this is {_our_version()}"
        took = _answer_ms(client, generates="classifier" not in info.capabilities, timeout_s=timeout_s)
    except errors.QueueFull as error:
        after = f"; try again in {error.retry_after_s:g} s" if error.retry_after_s else ""
        return Diagnosis(Verdict.BUSY, f"{error.message}{after}", note)
    except errors.DeadlineExceeded:
        return Diagnosis(_verdict_on_silence(client, timeout_s), f"no token within {timeout_s:g} s", note)
    except errors.Unavailable as error:
        drains = "drain" in error.message
        return Diagnosis(Verdict.DRAINING if drains else Verdict.NO_EXECUTOR, error.message, note)
    except errors.Unauthenticated as error:
        return Diagnosis(Verdict.TOKEN_WRONG, error.message, note)
    except (errors.Unsupported, errors.InvalidRequest) as error:
        verdict = Verdict.VERSION if note or isinstance(error, errors.Unsupported) else Verdict.FAILED
        return Diagnosis(verdict, error.message, note)
    except errors.PacelineError as error:
        return Diagnosis(Verdict.VERSION if note else Verdict.FAILED, error.message, note)
    running = f", {status.running} running, {status.waiting} waiting" if status else ""
    return Diagnosis(Verdict.OK, f"{info.name} answered in {took} ms{running}", note)


def _answer_ms(client: Client, *, generates: bool, timeout_s: float) -> int:
    """How long a token took, or the scores of one where the model has a classification head."""
    if not generates:
        return client.embed([[0]], timeout_s=timeout_s).usage.total_ms
    completion = client.complete(token_ids=[0], max_tokens=1, ignore_eos=True, timeout_s=timeout_s)
    return completion.finished.usage.total_ms if completion.finished else 0


def _verdict_on_silence(client: Client, timeout_s: float) -> Verdict:
    """The verdict on a request that got no token in time, from the scheduler's status."""
    try:
        status = client.status(timeout_s=timeout_s)
    except errors.Unauthenticated:  # it answers, and the caller may not read its status
        return Verdict.SLOW
    except errors.PacelineError:
        return Verdict.FROZEN
    problem = _state_problem(client, status, timeout_s)
    if problem is not None:
        return problem.verdict
    others = status.running > 1 or status.waiting > 1  # more than our own request
    return Verdict.SLOW if others else Verdict.NOT_SERVING


def _our_version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return ""


def _release(name: str) -> tuple[str, ...]:
    """The part of a version that must be equal: the major number; before 1.0, major and minor."""
    parts = name.split(".")
    return tuple(parts[:2] if parts[0] == "0" else parts[:1])
