"""`RemoteAdapters`: the adapters of one executor: listed, loaded and unloaded over its connection."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import errors
from paceline.aio.executor import ExecutorClient
from service_kit.logs import Log

from scheduler_service.link.codec.foreign import brief
from scheduler_service.link.codec.handshake import decode_adapter
from scheduler_service.link.handshake import RefusedExecutorError
from scheduler_service.link.required_adapters import WantedAdapters
from scheduler_service.model import ServedAdapter

log = Log(__name__)

LOAD_TIMEOUT_S = 300.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RemoteAdapters:
    """Every method raises `paceline.errors.PacelineError`, and ValueError for a malformed reply."""

    client: ExecutorClient

    async def listed(self) -> dict[str, ServedAdapter]:
        """Those that are loaded, by name; their paths are not known."""
        listed = await self.client.list_adapters(timeout_s=_TIMEOUT_S)
        return {adapter.name: decode_adapter(adapter, adapter.name, "") for adapter in listed}

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Load one; no change if it is loaded."""
        loaded = await self.client.load_adapter(name, path, timeout_s=LOAD_TIMEOUT_S)
        return decode_adapter(loaded, name, path)

    async def unload(self, name: str) -> bool:
        """Unload one; returns whether it was loaded."""
        return await self.client.unload_adapter(name, timeout_s=_TIMEOUT_S)

    async def bring(self, wanted: WantedAdapters) -> None:
        """Load all that are wanted and not loaded.

        When it returns, the executor has all that are wanted then. Raises RefusedExecutorError if it can't
        have one, or has another one of the same name.
        """
        for name, path in list(wanted.from_start.items()):
            wanted.add(await self._load(name, path))
        version = -1
        while wanted.needed and version != wanted.version:
            version, loaded = wanted.version, await self.listed()
            for adapter in wanted.needed:
                found = loaded.get(adapter.name)
                if found is None:
                    found = await self._load(adapter.name, adapter.path)
                    if found.fingerprint != adapter.fingerprint:
                        await self.unload(adapter.name)
                if found.fingerprint != adapter.fingerprint:
                    raise RefusedExecutorError(
                        f"its adapter {adapter.name} is another one "
                        f"(fingerprint {found.fingerprint.hex()[:12]}, not {adapter.fingerprint.hex()[:12]})"
                    )

    async def _load(self, name: str, path: str) -> ServedAdapter:
        try:
            return await self.load(name, path)
        except (errors.Unavailable, errors.DeadlineExceeded):
            raise
        except errors.PacelineError as error:
            raise RefusedExecutorError(
                f"adapter {name}: {why_not_loaded(error, self.client.address)}"
            ) from error


def why_not_loaded(error: errors.PacelineError, address: str) -> str:
    """Why an executor did not load or unload an adapter, for administrators."""
    if isinstance(error, errors.Unauthenticated):
        return (
            f"{brief(error.message)}: the scheduler's token must be an administrator's at the executor "
            f"{address} (admin: true in its entry of the executor's tokens file)"
        )
    return f"{brief(error.message)} (executor {address})"
