"""The asyncio clients: `Client` for a scheduler, `ExecutorClient` for an executor.

    async with aio.Client() as client:
        questions = ["What is the capital of Spain?", "What is the capital of Italy?"]
        answers = await asyncio.gather(*(client.chat(one, temperature=0) for one in questions))

Methods and errors are those of the blocking clients.
"""

from paceline.aio.client import Client
from paceline.aio.executor import ExecutorClient, StepStream
from paceline.aio.generation import Generation

__all__ = ["Client", "ExecutorClient", "Generation", "StepStream"]
