"""The asyncio client's calls for administrators: executors, adapters, and models to load."""

from __future__ import annotations

from paceline import responses
from paceline.aio.connections import SchedulerConnections
from paceline.scheduler.v1 import admin_pb2
from paceline.types import AdapterInfo, ExecutorStatus


class Administration:
    """What AdminService offers, which needs admin rights where callers need tokens. Part of `Client`."""

    _schedulers: SchedulerConnections

    async def executors(self, *, timeout_s: float | None = None) -> tuple[ExecutorStatus, ...]:
        """The executors of one scheduler that answers. Needs admin rights where callers need tokens."""
        request = admin_pb2.ListExecutorsRequest()
        return responses.executors(
            await self._schedulers.call(lambda endpoint: endpoint.admin.ListExecutors, request, timeout_s)
        )

    async def load_model(self, name: str, *, timeout_s: float | None = None) -> None:
        """Load one of several models at an address, and wait until it serves. Needs admin rights.

        Raises RetryLater if it has failed, with the reason; NotFound; Unsupported by a scheduler.
        """
        request = admin_pb2.LoadModelRequest(model=name)
        await self._schedulers.call(lambda endpoint: endpoint.admin.LoadModel, request, timeout_s)

    async def unload_model(self, name: str, *, timeout_s: float | None = None) -> bool:
        """Let a model's requests end, and put it away; the next request loads it again. Needs admin rights.

        Returns whether it was loaded. Raises NotFound; Unsupported by a scheduler.
        """
        request = admin_pb2.UnloadModelRequest(model=name)
        reply = await self._schedulers.call(lambda endpoint: endpoint.admin.UnloadModel, request, timeout_s)
        return reply.unloaded

    async def load_adapter(self, name: str, path: str = "", *, timeout_s: float | None = None) -> AdapterInfo:
        """Load an adapter on all executors of all schedulers; afterwards a request's `model` may name it.

        `path` (default: the name) is a directory below each executor's --adapter-dir. Needs admin rights.
        Raises the first error; loading again is harmless. NotFound: no such directory; DuplicateRequest: the
        name is another adapter's; StaleState: the executors' directories differ; QueueFull: no memory for it.
        """
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)
        replies = await self._schedulers.call_all(
            lambda endpoint: endpoint.admin.LoadAdapter, request, timeout_s
        )
        return responses.adapter(replies[0].adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> bool:
        """Unload an adapter from all executors of all schedulers, when live requests that name it have ended.

        Returns whether a scheduler had it. Needs admin rights. Raises the first error: unloading again is
        harmless.
        """
        request = admin_pb2.UnloadAdapterRequest(name=name)
        replies = await self._schedulers.call_all(
            lambda endpoint: endpoint.admin.UnloadAdapter, request, timeout_s
        )
        return any(reply.unloaded for reply in replies)

    async def adapters(self, *, timeout_s: float | None = None) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, of one scheduler that answers. Needs admin rights.

        `model_info().adapters` tells their names without.
        """
        request = admin_pb2.ListAdaptersRequest()
        reply = await self._schedulers.call(lambda endpoint: endpoint.admin.ListAdapters, request, timeout_s)
        return tuple(responses.adapter(one) for one in reply.adapters)
