"""Models of every architecture, split between two gloo ranks, equal transformers'."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.model import gloo_rank, wrapped_models
from tests.model.architectures import CASES, FAST_CASES, save_variant
from tests.model.test_architectures import TOKENS, Expected, assert_close, expected_of
from tests.model.wrapped_models import save_wrapped

pytestmark = pytest.mark.long

UNEVEN = "odd-heads"  # which two ranks can't share


@pytest.mark.parametrize(
    ("cases", "wrapped"),
    [
        (FAST_CASES, wrapped_models.FAST_CASES),
        pytest.param(CASES, wrapped_models.CASES, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_two_gloo_ranks_compute_the_same_models(
    cases: list[tuple[str, str]], wrapped: list[tuple[str, str]], tmp_path: Path
) -> None:
    listed, models = tmp_path / "models", []
    saved = [(save_variant, *case) for case in cases] + [(save_wrapped, *case) for case in wrapped]
    for save, architecture, variant in saved:
        if variant == UNEVEN:
            continue
        path = tmp_path / f"{save.__name__}-{architecture}-{variant}"
        expected = expected_of(save(architecture, variant, path))
        tokens = TOKENS[:31]
        for _ in range(gloo_rank.DRAFTS):
            tokens = [*tokens, int(expected(tokens)[-1].argmax())]
        models.append((path, tokens, expected))
    listed.write_text("".join(json.dumps([str(path), tokens]) + "\n" for path, tokens, _ in models))
    run_ranks(listed)
    for path, tokens, expected in models:
        check(dict(np.load(path / gloo_rank.RESULTS)), tokens, expected)


def run_ranks(listed: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "WORLD_SIZE": "2",
            gloo_rank.LISTENER: str(listener.fileno()), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.model.gloo_rank", str(listed)],
                env=os.environ | shared | {"RANK": str(rank)}, pass_fds=[listener.fileno()],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        pytest.fail("\n".join(said))


def check(found: dict[str, np.ndarray], tokens: list[int], expected: Expected) -> None:
    whole = expected(tokens)
    assert_close(found["whole"], whole)
    assert_close(found["pieces"], whole[gloo_rank.SPLIT :])
    kept = len(tokens) - gloo_rank.BACK
    assert_close(found["truncated"], expected(tokens[:kept] + tokens[:5])[kept:])
    assert_close(found["forked"], expected(tokens[: kept - 1] + tokens[5:9])[kept - 1 :])
    assert found["tokens"].tolist()[:-1] == tokens[-gloo_rank.DRAFTS :]
