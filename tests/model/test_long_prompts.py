"""Prompts of 32,768 tokens, four times the trained length, have transformers' tokens.

Real processes compute them: in chunks, after a cached prefix, and after an executor is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paceline import aio, types
from transformers import LlamaConfig

from tests.model.tiny import save_random
from tests.support.stack import Stack, ids_of, oracle_stack
from tests.support.untyped import present

pytestmark = pytest.mark.slow

TRAINED, PROMPT, TOKENS, TAIL = 8192, 32_768, 24, 100
CONTEXT = PROMPT + TRAINED
FACTORS = {"short_factor": [1.0] * 8, "long_factor": np.linspace(1.2, 6.0, 8).tolist()}
EXTENDED = {"original_max_position_embeddings": TRAINED}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # max_position_embeddings, rope_parameters
    "yarn": (TRAINED, EXTENDED | {"rope_type": "yarn", "factor": CONTEXT / TRAINED}),
    "longrope": (CONTEXT, EXTENDED | FACTORS | {"rope_type": "longrope"}),
    "dynamic": (TRAINED, {"rope_type": "dynamic", "factor": CONTEXT / TRAINED}),
}
EXECUTOR = ["--backend", "torch", "--device", "cpu", "--pages", "8192", "--threads", "1"]


class Reference:
    """transformers' model, after an input of the whole context, whose frequencies dynamic NTK keeps."""

    def __init__(self, kind: str, path: Path) -> None:
        positions, rope = KINDS[kind]
        config = LlamaConfig(
            vocab_size=211,
            hidden_size=64,
            intermediate_size=88,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            rope_parameters=rope,
            eos_token_id=2,
        )
        self._model: Any = save_random(config, path, attention="sdpa")
        self._greedy([3] * (CONTEXT - 1), 1)

    def greedy(self, tokens: list[int]) -> list[int]:
        return self._greedy(tokens, TOKENS)

    def _greedy(self, tokens: list[int], count: int) -> list[int]:
        made = self._model.generate(
            torch.tensor([tokens]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        ids: list[int] = made[0, len(tokens) :].tolist()
        return ids


def generation(client: aio.Client, tokens: list[int]) -> aio.Generation:
    return client.generate(token_ids=tokens, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


async def active_of(client: aio.Client) -> str:
    return next(one.address for one in await client.executors() if one.active)


async def lose_one_in_mid_stream(stack: Stack, client: aio.Client, tokens: list[int]) -> list[int]:
    """The ids of a stream whose executor is killed after its first tokens."""
    address, killed = await active_of(client), False
    ids: list[int] = []
    async for event in generation(client, tokens):
        if isinstance(event, types.Delta):
            ids += event.token_ids
            if not killed and len(ids) >= TOKENS // 4:
                stack.executor(address).kill()
                killed = True
    assert await active_of(client) != address
    return ids


@pytest.mark.parametrize("kind", list(KINDS))
async def test_a_prompt_of_32768_tokens_has_transformers_tokens(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    reference = Reference(kind, path)
    tokens = np.random.default_rng(1).integers(3, 211, PROMPT).tolist()
    other = tokens[:-TAIL] + np.random.default_rng(2).integers(3, 211, TAIL).tolist()
    expected, expected_other = reference.greedy(tokens), reference.greedy(other)
    assert expected != expected_other

    executor = [*EXECUTOR, "--model", str(path)]
    with oracle_stack(tmp_path, executor=executor, executors=2) as stack:
        async with stack.client() as client:
            [first] = await generation(client, tokens).collect()
            assert ids_of(first) == expected
            assert present(first.finished).usage.cached_tokens == 0

            [second] = await generation(client, other).collect()
            assert ids_of(second) == expected_other
            assert present(second.finished).usage.cached_tokens >= PROMPT - TAIL - 16

            assert await lose_one_in_mid_stream(stack, client, other) == expected_other
