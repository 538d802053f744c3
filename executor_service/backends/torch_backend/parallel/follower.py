"""`follow`: the loop of a rank above 0, which repeats the backend calls of rank 0."""

from __future__ import annotations

import torch
from service_kit.logs import Log

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.parallel.adapter_buffer import SLOT, unpack_weights
from executor_service.backends.torch_backend.parallel.group import Group
from executor_service.backends.torch_backend.parallel.plan_buffer import (
    Body,
    CollectiveCall,
    unpack_inputs,
)
from executor_service.backends.torch_backend.parallel.ranks import Rank
from executor_service.backends.torch_backend.parallel.tensor_shard import TensorShard

log = Log(__name__)


def follow(config: TorchConfig, rank: Rank, timeout_s: float) -> None:
    """Load this rank's share of the model and repeat the calls of rank 0 until it closes.

    Raises ModelError. Any other exception means that this rank or another has failed.
    """
    group = Group(rank, torch.device(config.device), timeout_s)
    backend = TorchBackend(config, TensorShard(group))
    backend.load(lambda *_: None)
    log.info("rank loaded", rank=rank.number, memory_bytes=backend.memory_bytes())
    while True:
        number, body = group.receive_plan()
        call = CollectiveCall(number)
        if call is CollectiveCall.CLOSE:
            break
        _obey(backend, call, body)
    backend.close()
    group.close()


def _obey(backend: TorchBackend, call: CollectiveCall, body: Body) -> None:
    if call is CollectiveCall.REPEAT:
        backend.repeat(body)
    elif call is CollectiveCall.LOAD_ADAPTER:
        backend.load_adapter(int(body[SLOT]), backend.prepare_adapter(unpack_weights(body)))
    elif call is CollectiveCall.UNLOAD_ADAPTER:
        backend.unload_adapter(int(body[0]))
    elif call is CollectiveCall.OFFER_ADAPTERS:
        backend.offer_adapters(int(body[0]), max_bytes=0)  # rank 0 decides about memory
    elif call is CollectiveCall.COPY_PAGE:
        backend.copy_page(int(body[0]), int(body[1]))
    elif call is CollectiveCall.ALLOCATE:
        backend.allocate(int(body[0]), int(body[1]))
    elif call is CollectiveCall.DEFAULT_PAGES:
        backend.default_pages(*body.tolist())
    else:
        backend.forward_once(*unpack_inputs(body))
