"""One rank of a group that computes some models one by one: `python -m tests.model.gloo_rank FILE`.

FILE has a line for each model: its directory, and tokens that follow each other. Rank 0 writes what it
computed beside the model. Which rank this is, say the environment variables of torchrun, and LISTENER the
socket on which rank 0 waits for the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.parallel.group import Group
from executor_service.backends.torch_backend.parallel.ranks import Rank
from executor_service.backends.torch_backend.parallel.tensor_shard import TensorShard
from executor_service.contract.plan import OutputMode
from tests.model.driver import Driver, pages_from
from tests.support.untyped import present

PAGE, PAGES = 16, 40
LISTENER = "PACELINE_TEST_LISTENER"  # environment variable: a file descriptor
RESULTS = "two_ranks.npz"
SPLIT, BACK, DRAFTS = 17, 9, 6


def main(listed: Path) -> None:
    rank = present(Rank.from_environment(os.environ))
    listener = None if rank.number else socket.socket(fileno=int(os.environ[LISTENER]))
    group = Group(rank, torch.device("cpu"), timeout_s=60, listener=listener)
    for line in listed.read_text().splitlines():
        path, tokens = json.loads(line)
        backend = TorchBackend(TorchConfig(Path(path), threads=1), TensorShard(group))
        backend.load(lambda what, done: None)
        backend.allocate(PAGES, PAGE)
        results = compute(backend, tokens)
        if group.rank == 0:
            np.savez(Path(path) / RESULTS, **results)  # type: ignore[arg-type]  # it takes any names
        backend.close()
    group.close()


def compute(backend: TorchBackend, tokens: list[int]) -> dict[str, np.ndarray]:
    """Of tokens in one piece, in two beside them, after a truncation and a fork, and as drafts."""
    pages, count = pages_from(1), len(tokens)
    whole, pieces, drafted = (Driver(pages, PAGE) for _ in range(3))
    backend.forward([pieces.feed(tokens[:SPLIT])])
    rows = [whole.feed(tokens, count), pieces.feed(tokens[SPLIT:], count - SPLIT)]
    outs = backend.forward([*rows, drafted.feed(tokens[: -1 - DRAFTS])])
    whole.truncate(count - BACK)
    fork = whole.fork(backend, count - BACK - 1)
    rows = [whole.feed(tokens[:5], 5), fork.feed(tokens[5:9], 4)]
    drafts = drafted.feed(tokens[-1 - DRAFTS :], 1 + DRAFTS, OutputMode.SAMPLE)
    outs = [*outs[:2], *backend.forward([*rows, drafts])]
    names = ("whole", "pieces", "truncated", "forked")
    results = {name: present(out.logits) for name, out in zip(names, outs, strict=False)}
    return results | ({"tokens": present(outs[4].tokens)} if outs else {})  # other ranks have none


if __name__ == "__main__":
    main(Path(sys.argv[1]))
