"""Which executor is checked: the one at --executor, or our own backends one after another."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from paceline.channel import Security
from paceline.executor.v1 import executor_pb2 as pb

pytest.register_assert_rewrite("tests.conformance.kit")

from tests.conformance.kit.client import Executor, Session  # noqa: E402  # after the rewrite is set up
from tests.conformance.kit.draw import Draw  # noqa: E402
from tests.conformance.kit.expect import balanced, code_of  # noqa: E402
from tests.conformance.kit.judge import Judge  # noqa: E402
from tests.conformance.kit.speed import measured_deadline_s  # noqa: E402
from tests.conformance.kit.target import BACKENDS, Target, connect, connect_when_loaded, start  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "the executor under test")
    group.addoption("--executor", metavar="HOST:PORT", help="check this one instead of our own backends")
    group.addoption("--exact", action="store_true", help="its arithmetic has no rounding: forgive none")
    group.addoption("--may-drain", action="store_true", help="it may be drained, which ends its use")
    group.addoption(
        "--deadline", type=float, metavar="SECONDS", help="of each call; default: 60, or more if it is slow"
    )
    group.addoption("--kit-seed", metavar="TEXT", help="of all test data; default: random with --executor")
    group.addoption("--adapters", default="", metavar="PATH,...", help="adapters below its adapter directory")
    group.addoption("--tls-ca", type=Path, metavar="PEM", help="authority of its certificate")
    group.addoption("--tls-cert", type=Path, metavar="PEM", help="our certificate, for mutual TLS")
    group.addoption("--tls-key", type=Path, metavar="PEM", help="and its key")
    group.addoption("--tls-name", default="", metavar="NAME", help="the name in its certificate")
    group.addoption("--token", default="", help="sent as `authorization: Bearer ...`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*capabilities): skipped where GetInfo does not advertise them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        address = metafunc.config.getoption("--executor", default=None)
        ours = getattr(metafunc.module, "TARGETS", BACKENDS)
        metafunc.parametrize("target", [address] if address else ours, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--executor", default=None):  # what ends its use comes last
        items.sort(key=lambda item: "drainable" in getattr(item, "fixturenames", ()))


def pytest_report_header(config: pytest.Config) -> str | None:
    if address := config.getoption("--executor", default=None):
        return f"executor under test: {address}, --kit-seed {kit_seed(config)}"
    return None


def kit_seed(config: pytest.Config) -> str:
    """A live executor may be checked twice: with other data, or its prefix cache knows every prompt."""
    if config.getoption("--kit-seed", default=None) is None:
        fresh = secrets.token_hex(4) if config.getoption("--executor", default=None) else "0"
        config.option.kit_seed = fresh
    seed: str = config.option.kit_seed
    return seed


@pytest.fixture(scope="session")
def processes() -> Iterator[ExitStack]:
    """Our own executors, each started when first needed and stopped at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def started() -> dict[str, Executor]:
    """Clients of those that were started, by backend. pytest makes `target` anew whenever it changes."""
    return {}


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The address under test, or the backend of our own."""
    option = request.config.getoption
    if option("--executor", default=None):
        security = Security(
            ca_file=option("--tls-ca"),
            cert_file=option("--tls-cert"),
            key_file=option("--tls-key"),
            token=option("--token"),
            server_name=option("--tls-name"),
        )
        adapters = tuple(filter(None, option("--adapters").split(",")))
        return Target(request.param, security, adapters=adapters)
    return Target(request.param)


@pytest.fixture(scope="session")
def executor(
    request: pytest.FixtureRequest,
    target: Target,
    processes: ExitStack,
    started: dict[str, Executor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Executor:
    """A client of the executor under test."""
    if not request.config.getoption("--executor", default=None):
        if target.name not in started or started[target.name].lost:
            started[target.name] = connect(start(target.name, processes, tmp_path_factory), processes)
        return started[target.name]
    try:
        executor = connect_when_loaded(target, processes, told(request.config))
        executor.deadline_s = request.config.getoption("--deadline") or measured_deadline_s(executor)
    except grpc.RpcError as error:
        where, why = target.address or target.name, f"{code_of(error).name}: {error.details()}"
        pytest.exit(f"no executor answers at {where}: {why}", 2)
    return executor


def told(config: pytest.Config) -> Callable[[str], None]:
    """Prints what the executor under test does before it can be checked, each state once."""
    terminal, capture = config.get_terminal_writer(), config.pluginmanager.getplugin("capturemanager")
    last = ""

    def tell(what: str) -> None:
        nonlocal last
        if what != last:
            last = what
            with capture.global_and_fixture_disabled():
                terminal.line(f"waiting for the executor: {what}")

    return tell


@pytest.fixture
def drainable(
    request: pytest.FixtureRequest,
    target: Target,
    processes: ExitStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Executor:
    """An executor whose use may end: one of our own just for this, or the given one, if that is allowed."""
    if not request.config.getoption("--executor", default=None):
        return connect(start(target.name, processes, tmp_path_factory), processes)
    if not request.config.getoption("--may-drain"):
        pytest.skip("draining can't be taken back; --may-drain allows it")
    return connect(target, processes)


@pytest.fixture(scope="session")
def judge(request: pytest.FixtureRequest, executor: Executor) -> Judge:
    """Says which tokens are right."""
    exact = executor.info.backend == "oracle" or bool(request.config.getoption("--exact", default=False))
    return Judge(executor, exact)


@pytest.fixture
def draw(request: pytest.FixtureRequest, executor: Executor) -> Draw:
    """This test's data."""
    return Draw(executor, f"{kit_seed(request.config)}/{request.node.originalname}/{request.node.name}")


@pytest.fixture
def session(executor: Executor) -> Session:
    """A session of this test's own."""
    return executor.open_session()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips what is not advertised; afterwards no cache of the test lives, no page is lost."""
    if "target" not in request.fixturenames:
        yield
        return
    executor: Executor = request.getfixturevalue("executor")
    if executor.lost:
        pytest.fail("the executor is gone", pytrace=False)
    for marker in request.node.iter_markers("needs"):
        for capability in marker.args:
            if not executor.can(capability):
                pytest.skip(f"{capability} is not advertised")
    before = executor.at_rest or executor.status()
    executor.at_rest = None
    yield
    try:
        for session in tuple(executor.open_sessions.values()):
            session.close()
        after = executor.status()
        balanced(executor, after)
    except grpc.RpcError as error:
        executor.lost = code_of(error) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        raise
    if after.state == pb.EXECUTOR_STATE_SERVING:
        assert after.sequences == before.sequences, "caches outlived their session"
        assert after.cache.owned_pages == before.cache.owned_pages, "pages outlived their caches"
        assert after.adapters.used_slots == before.adapters.used_slots, "slots outlived their caches"
        executor.at_rest = after
