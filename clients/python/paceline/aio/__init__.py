"""The asyncio clients: `Client` for a scheduler, `ExecutorClient` for an executor."""

from paceline.aio.client import Client
from paceline.aio.executor import ExecutorClient, StepStream
from paceline.aio.generation import Generation

__all__ = ["Client", "ExecutorClient", "Generation", "StepStream"]
