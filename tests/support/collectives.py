"""Counts what the ranks of a group do together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist

from executor_service.backends.torch_backend.parallel import group


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts this rank's calls of torch.distributed that all ranks make together."""
    counts: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    with ExitStack() as patches:
        for module, name in ((group, "_all_gather"), (dist, "broadcast"), (dist, "gather")):
            patches.enter_context(mock.patch.object(module, name, counting(name, getattr(module, name))))
        yield counts
