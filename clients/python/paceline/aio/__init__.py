"""The asyncio clients: `Client` for a scheduler, `ExecutorClient` for an executor."""

from paceline.aio.client import Client, Generation
from paceline.aio.executor import ExecutorClient, StepStream

__all__ = ["Client", "ExecutorClient", "Generation", "StepStream"]
