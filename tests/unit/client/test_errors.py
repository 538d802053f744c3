import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.rpc import error_details_pb2, status_pb2
from paceline import errors
from paceline.requests import Options
from paceline.scheduler.v1 import scheduler_pb2


def leaves(kind: type[errors.PacelineError]) -> set[type[errors.PacelineError]]:
    below = kind.__subclasses__()
    return set().union(*(leaves(one) for one in below)) if below else {kind}


def test_every_status_has_its_error() -> None:
    assert set(errors.BY_CODE) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_every_error_comes_from_some_status() -> None:
    of_the_sdk = {errors.InvalidOutput, errors.StepRefused, errors.StreamLost}
    assert leaves(errors.PacelineError) - of_the_sdk == set(errors.BY_CODE.values())


def test_the_tree_at_the_top_of_the_file_names_every_error() -> None:
    drawn = errors.__doc__ or ""
    for kind in leaves(errors.PacelineError) | {errors.RetryLater, errors.PacelineError}:
        assert f" {kind.__name__} " in drawn or f" {kind.__name__}\n" in drawn


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name not in ("OK", "CANCELLED")])
def test_an_error_keeps_its_status_and_message(code: grpc.StatusCode) -> None:
    error = errors.from_status(code, "why")
    assert (type(error), error.code, str(error)) == (errors.BY_CODE[code], code, "why")


def test_row_errors_map_like_statuses() -> None:
    assert type(errors.from_code(8, "pages")) is errors.QueueFull
    assert type(errors.from_code(5, "cache")) is errors.NotFound


def test_a_number_that_is_no_status_is_an_internal_error() -> None:
    assert type(errors.from_code(99, "?")) is errors.InternalError


def test_an_error_without_text_says_its_status() -> None:
    assert str(errors.from_status(grpc.StatusCode.UNAVAILABLE, "")) == "UNAVAILABLE"


def test_broken_details_do_not_hide_the_status() -> None:
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    assert type(errors.from_status(grpc.StatusCode.INTERNAL, "x", trailers)) is errors.InternalError


def test_a_cancellation_that_no_service_explains_is_a_lost_connection() -> None:
    assert isinstance(errors.from_status(grpc.StatusCode.CANCELLED, "CANCELLED"), errors.Unavailable)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to"
            " remote host: Connection refused",
            "failed to connect to 127.0.0.1:9: Connection refused (nobody listens; `paceline serve` starts a"
            " service)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:9: Ssl handshake"
            " failed: bad",
            "failed to connect to [::1]:9: Ssl handshake failed: bad",
        ),
        ("failed to connect to all addresses", "failed to connect to all addresses"),
        (
            "errors resolving nowhere:9: [field:hostname lookup error:address lookup failed for nowhere:9:"
            " Domain name not found]",
            "errors resolving nowhere:9: nobody knows this host name",
        ),
    ],
)
def test_a_missing_connection_is_told_by_its_address_and_cause(said: str, told: str) -> None:
    error = errors.from_status(grpc.StatusCode.UNAVAILABLE, said)
    assert isinstance(error, errors.Unavailable)
    assert str(error) == told


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("sampling", scheduler_pb2.SamplingParams.DESCRIPTOR),
        ("stop", scheduler_pb2.StopConditions.DESCRIPTOR),
        ("grammar", scheduler_pb2.Grammar.DESCRIPTOR),
        ("speculation", scheduler_pb2.Speculation.DESCRIPTOR),
    ],
)
def test_an_invalid_request_names_the_sdks_argument(group: str, message: Descriptor) -> None:
    for field in message.fields_by_name:
        error = invalid(f"{group}.{field}[0]: too large", f"{group}.{field}[0]")
        argument, _, problem = str(error).partition("[0]: ")
        assert argument.split(".")[0] in Options.__annotations__
        assert problem == "too large"
    assert str(invalid("ops[1].stop.x: no", "ops[1].stop.x")) == "ops[1].stop.x: no"
    assert str(invalid("grammar.regex: no", "")) == "grammar.regex: no"  # an executor's


def invalid(message: str, field: str) -> errors.PacelineError:
    details = status_pb2.Status(code=3)
    details.details.add().Pack(
        error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", metadata={"field": field})
    )
    trailers = (("grpc-status-details-bin", details.SerializeToString()),)
    return errors.from_status(grpc.StatusCode.INVALID_ARGUMENT, message, trailers)
