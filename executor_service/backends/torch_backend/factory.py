"""Makes the torch backend: of a single process, of rank 0, or of a follower rank.

torch is imported inside the functions: rank 0 starts the followers first, so that all import it in parallel.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from service_kit.logs import Log
from service_kit.parent import STDIN

from executor_service.backends.base import Backend, ModelError
from executor_service.backends.torch_backend.parallel.followers import Followers
from executor_service.backends.torch_backend.parallel.ranks import Rank, RankLost, listen
from executor_service.backends.torch_backend.settings import TorchSettings
from executor_service.fatal import EXIT_FAULT, EXIT_MODEL, die

if TYPE_CHECKING:
    from executor_service.backends.torch_backend.config import TorchConfig

log = Log(__name__)


def torch_backend(settings: TorchSettings, follower_flags: Sequence[str]) -> Backend:
    """The backend of the serving process; starts the follower ranks, if any. Raises ModelError."""
    rank = _launched(settings)
    if rank is None and settings.tensor_parallel == 1:
        from executor_service.backends.torch_backend.backend import TorchBackend

        return TorchBackend(torch_config(settings))
    listener = None
    if rank is None:
        listener = listen()
        ranks = [
            Rank.on_this_machine(number, settings.tensor_parallel, listener.getsockname()[1])
            for number in range(settings.tensor_parallel)
        ]
        rank, others = ranks[0], ranks[1:]
        followers = Followers([sys.executable, "-m", "executor_service", *follower_flags], others, _lost)
    else:
        followers = Followers([], [], _lost)  # the launcher started them
    from executor_service.backends.torch_backend.parallel.leader import LeaderBackend

    return LeaderBackend(torch_config(settings, rank), rank, settings.rank_timeout_s, followers, listener)


def follower_rank(settings: TorchSettings) -> Rank | None:
    """This process's rank if it is a follower, None if it serves. Raises ModelError."""
    rank = _launched(settings)
    return rank if rank is not None and rank.number > 0 else None


def follow(settings: TorchSettings, rank: Rank, *, exit_with_stdin: bool) -> None:
    """Compute with rank 0 until it closes. Ends the process if a rank is lost or the model unusable.

    `exit_with_stdin`: also end the process when its standard input closes, as it does when rank 0 ends.
    """
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):  # rank 0 handles them: draining needs all ranks
        signal.signal(number, signal.SIG_IGN)
    if exit_with_stdin:
        threading.Thread(target=_end_with_stdin, args=(rank,), name="parent", daemon=True).start()
    try:
        from executor_service.backends.torch_backend.parallel.follower import follow

        follow(torch_config(settings, rank), rank, settings.rank_timeout_s)
    except Exception as error:
        die(error)


def _launched(settings: TorchSettings) -> Rank | None:
    """This process's rank, if a launcher (torchrun) started several ranks. Raises ModelError."""
    try:
        rank = Rank.from_environment(os.environ)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if rank is None or rank.ranks == 1:
        return None
    if settings.tensor_parallel not in (1, rank.ranks):
        raise ModelError(
            f"--tensor-parallel {settings.tensor_parallel}: a launcher started {rank.ranks} ranks"
        )
    return rank


def torch_config(settings: TorchSettings, rank: Rank | None = None) -> TorchConfig:
    """The settings with their defaults filled in, for one of several ranks. Raises ModelError, ValueError."""
    import torch

    from executor_service.backends.torch_backend.config import BLOCKS, TorchConfig

    assert settings.model is not None
    device, threads = settings.device, settings.threads
    dtype: str = settings.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        on_cpu = BLOCKS if device == "cpu" and _is_gguf(settings.model) else "float32"
        dtype = "bfloat16" if device.startswith("cuda") else on_cpu
    if rank is not None:
        threads = threads or max((os.cpu_count() or 1) // rank.local_ranks, 1)
        if device.startswith("cuda:"):
            raise ModelError(f"--device {device} is one device for {rank.ranks} ranks; say cuda")
        devices = torch.cuda.device_count()
        if device == "cuda" and devices < rank.local_ranks:
            raise ModelError(f"--tensor-parallel: {rank.local_ranks} ranks here, but {devices} CUDA devices")
    if device == "cuda":
        device = f"cuda:{rank.local_number if rank else 0}"
    return TorchConfig(
        settings.model,
        device=device,
        dtype=dtype,
        kv_dtype=settings.kv_dtype,
        threads=threads,
        max_context=settings.max_context,
        sampling_defaults=settings.sampling_defaults,
        graphs=settings.graphs == "on",
        programmatic_dependent_launch={"auto": None, "on": True, "off": False}[
            settings.programmatic_dependent_launch
        ],
    )


def _is_gguf(model: Path) -> bool:
    """Whether this is a GGUF file; its faults are found when it is loaded."""
    from executor_service.backends.torch_backend.files.gguf_file import MAGIC

    try:
        with model.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _lost(rank: int, status: int) -> NoReturn:
    if status == EXIT_MODEL:
        die(ModelError(f"rank {rank} can't load the model"))
    die(RankLost(f"rank {rank} ended with status {status}"))


def _end_with_stdin(rank: Rank) -> None:
    """End this process when rank 0 ends: rank 0 holds the write end of the pipe on standard input."""
    while os.read(STDIN, 4096):
        pass
    log.warning("rank 0 is gone; ending", rank=rank.number)
    os._exit(EXIT_FAULT)
