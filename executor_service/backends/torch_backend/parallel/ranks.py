"""`Rank`: a process's place in a tensor-parallel group. Does not import torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


class RankLost(Exception):
    """A process of the group ended, so the others can't compute."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `ranks` processes that share a model. Rank 0 serves; the others compute with it.

    `local_number` counts the ranks of one machine and is the CUDA device's index. The environment variables
    are those of torchrun (docs.pytorch.org/docs/stable/elastic/run.html).
    """

    number: int
    ranks: int
    local_number: int
    local_ranks: int
    host: str  # address of the rendezvous
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rank | None:
        """This process's rank as a launcher such as torchrun set it; None without one. Raises ValueError."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
            return None
        number, ranks = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE")
        rank = cls(
            number,
            ranks,
            _whole(environment, "LOCAL_RANK", number),
            _whole(environment, "LOCAL_WORLD_SIZE", ranks),
            environment["MASTER_ADDR"],
            _whole(environment, "MASTER_PORT"),
        )
        if not 0 <= rank.number < rank.ranks or not 0 <= rank.local_number < rank.local_ranks:
            raise ValueError(f"RANK {rank.number} of WORLD_SIZE {rank.ranks} is outside the group")
        return rank

    @classmethod
    def on_this_machine(cls, number: int, ranks: int, port: int) -> Rank:
        """A rank of a group on one machine, whose rendezvous is `port` on loopback."""
        return cls(number, ranks, number, ranks, LOOPBACK, port)

    def environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_number),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def listen() -> socket.socket:
    """A listening socket on a free loopback port: the rendezvous of this machine's ranks."""
    return socket.create_server((LOOPBACK, 0))


def _whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}, expected a whole number") from None
