"""What `paceline serve` starts."""

from pathlib import Path

import pytest
from paceline.cli.stack import Stack, StackConfig
from paceline.cli.stack_secrets import StackSecrets
from paceline.cli.supervisor import Child


def child(name: str, directory: Path) -> Child:
    """One that was not started."""
    return Child(name, lambda port: [], directory / name, lambda child, what: None)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("0.0.0.0", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("[::1]", "[::1]:7"),
        ("::", "127.0.0.1:7"),
        ("[::]", "127.0.0.1:7"),
        ("localhost", "localhost:7"),
    ],
)
def test_clients_of_this_machine_are_told_an_address_that_a_channel_can_reach(
    host: str, address: str, tmp_path: Path
) -> None:
    scheduler = child("scheduler", tmp_path)
    scheduler.port = 7
    executor = child("executor", tmp_path)
    stack = Stack(StackConfig("oracle", host=host), StackSecrets(), "unix:/x", executor, scheduler)
    assert stack.address == address
