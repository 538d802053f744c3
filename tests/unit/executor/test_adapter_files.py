"""Adapters are read as PEFT writes them; what changes the result and is not supported is refused by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_service.adapters.inside import NoSuchAdapter, PathRefused
from executor_service.adapters.peft_directory import AdapterBounds, LoadStopped, read_adapter
from executor_service.adapters.weights import AdapterTarget, AdapterWeights, as_float32
from executor_service.contract.model_error import ModelError
from tests.support.adapter_files import PREFIX, QUERIES_AND_VALUES, factors, write_adapter, write_tensors

ANY = AdapterTarget()
MODEL = AdapterTarget(
    {
        (layer, name): shape
        for layer in range(2)
        for name, shape in (("q_proj", (8, 6)), ("v_proj", (8, 4)), ("down_proj", (5, 8)))
    }
)
FITTING = {
    (layer, f"self_attn.{name}"): shape
    for layer in range(2)
    for name, shape in (("q_proj", (8, 6)), ("v_proj", (8, 4)))
}
BOUNDS = AdapterBounds(max_rank=64, max_bytes=1 << 20)
Q0 = f"{PREFIX}0.self_attn.q_proj.lora_A.weight"


def read(root: Path, path: str = "one", target: AdapterTarget = ANY, **bounds: int) -> AdapterWeights:
    return read_adapter(
        root, path, target, b"model", AdapterBounds(**({"max_rank": 64, "max_bytes": 1 << 20} | bounds))
    )


def test_factors_scale_and_modules_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = factors(FITTING)
    write_adapter(tmp_path / "one", tensors)
    weights = read(tmp_path, target=MODEL)
    assert (weights.rank, weights.scale, weights.modules) == (4, 2.0, ("q_proj", "v_proj"))
    assert [(change.layer, change.module) for change in weights.changes] == [
        (0, "q_proj"), (0, "v_proj"), (1, "q_proj"), (1, "v_proj"),
    ]  # fmt: skip
    for change in weights.changes:
        name = f"{PREFIX}{change.layer}.self_attn.{change.module}."
        assert np.array_equal(change.a, tensors[name + "lora_A.weight"])
        assert np.array_equal(change.b, tensors[name + "lora_B.weight"])
    assert weights.bytes == sum(array.nbytes for array in tensors.values())


def test_the_scale_of_a_rank_stabilized_adapter_divides_by_the_root(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", use_rslora=True)
    assert read(tmp_path).scale == 4.0


def test_ranks_and_scales_by_pattern_are_those_of_peft(tmp_path: Path) -> None:
    """All have one rank and one scale: zeros fill up, and what is left of a scale is in the second factor."""
    tensors = factors(FITTING) | factors({(1, "self_attn.v_proj"): (8, 4)}, rank=2)
    ranks, alphas = (
        {r"layers\.1\.self_attn\.v_proj": 2, "v_proj": 4},
        {"1.self_attn.(q|v)_proj": 3, "v_proj": 8},
    )
    write_adapter(tmp_path / "one", tensors, rank_pattern=ranks, alpha_pattern=alphas)
    weights = read(tmp_path, target=MODEL)
    assert (weights.rank, weights.scale) == (4, 2.0)
    expected = {(0, "q_proj"): 2.0, (0, "v_proj"): 2.0, (1, "q_proj"): 3 / 4, (1, "v_proj"): 3 / 2}
    for change in weights.changes:
        name = f"{PREFIX}{change.layer}.self_attn.{change.module}."
        a, b = tensors[name + "lora_A.weight"], tensors[name + "lora_B.weight"]
        assert (change.a.shape[0], change.b.shape[1]) == (4, 4)
        product = expected[change.layer, change.module] * (b @ a)
        assert np.allclose(weights.scale * (change.b @ change.a), product, rtol=1e-6)


def test_patterns_that_change_nothing_leave_the_fingerprint(tmp_path: Path) -> None:
    unchanged = fingerprint(tmp_path, rank_pattern={"q_proj": 4}, alpha_pattern={".*": 8})
    assert unchanged == fingerprint(tmp_path)
    assert fingerprint(tmp_path, alpha_pattern={"q_proj": 9}) != fingerprint(tmp_path)


def test_a_scale_that_makes_a_factor_infinite_is_refused(tmp_path: Path) -> None:
    tensors = {name: array * np.float32(1e35) for name, array in factors().items()}
    write_adapter(tmp_path / "one", tensors, alpha_pattern={"v_proj": 1e11})
    with pytest.raises(ModelError, match="alpha_pattern: the scale of v_proj in layer 0"):
        read(tmp_path)


@pytest.mark.parametrize("excluded", [["1.self_attn.v_proj"], r"model\.layers\.1\..*v_proj"])
def test_what_is_excluded_has_no_tensors(tmp_path: Path, excluded: object) -> None:
    tensors = {name: array for name, array in factors(FITTING).items() if "1.self_attn.v_proj" not in name}
    write_adapter(tmp_path / "one", tensors, exclude_modules=excluded)
    assert len(read(tmp_path, target=MODEL).changes) == 3
    write_adapter(tmp_path / "one", factors(FITTING), exclude_modules=excluded)
    with pytest.raises(ModelError, match="v_proj in layer 1 is not among"):
        read(tmp_path, target=MODEL)
    write_adapter(tmp_path / "one", tensors)
    with pytest.raises(ModelError, match="v_proj in layer 1 is missing"):
        read(tmp_path, target=MODEL)


def test_half_precision_is_kept_as_it_is_stored(tmp_path: Path) -> None:
    for dtype in (np.float16, np.uint16):
        stored = {
            name: array.astype(np.float16)
            if dtype is np.float16
            else (array.view(np.uint32) >> 16).astype(np.uint16)
            for name, array in factors().items()
        }
        write_adapter(tmp_path / "one", stored)
        weights = read(tmp_path)
        assert weights.bytes == sum(array.nbytes for array in stored.values())
        for change in weights.changes:
            exact = factors()[f"{PREFIX}0.self_attn.{change.module}.lora_A.weight"]
            assert np.allclose(as_float32(change.a), exact, rtol=2**-7)


def fingerprint(directory: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> bytes:
    write_adapter(directory / "one", tensors, **changes)
    return read(directory).fingerprint


def test_a_fingerprint_covers_all_that_changes_tokens_and_nothing_else(tmp_path: Path) -> None:
    base = fingerprint(tmp_path)
    tensors = factors()
    assert fingerprint(tmp_path, dict(reversed(tensors.items()))) == base
    assert fingerprint(tmp_path, base_model_name_or_path="elsewhere", lora_dropout=0.5) == base
    changed = {name: array.copy() for name, array in tensors.items()}
    changed[Q0][3, 127] += 1
    others = [
        fingerprint(tmp_path, changed),
        fingerprint(tmp_path, lora_alpha=9),
        fingerprint(tmp_path, use_rslora=True),
        fingerprint(tmp_path, {name.replace("layers.0", "layers.1"): a for name, a in tensors.items()}),
        fingerprint(tmp_path, {name: a.astype(np.float16) for name, a in tensors.items()}),
        read_adapter(tmp_path, "one", ANY, b"another model", BOUNDS).fingerprint,
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"peft_type": ...}, "peft_type is missing"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not a map"),
        ({"rank_pattern": {"q_proj": 65}}, "rank_pattern: 65, at most 64"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern: q_proj is '8'"),
        ({"alpha_pattern": {"(a+)+$": 8}}, "alpha_pattern: the pattern .* has more than names"),
        ({"rank_pattern": {"a{9}": 8}}, "rank_pattern: the pattern .* has more than names"),
        ({"rank_pattern": {".*.*.*q": 8}}, "rank_pattern: the pattern .* has more than 2 repetitions"),
        ({"rank_pattern": {"(q": 8}}, "rank_pattern: the pattern '.q'"),
        ({"rank_pattern": {"q" * 999: 8}}, "rank_pattern: a pattern of 999 characters, at most 256"),
        ({"rank_pattern": {f"q{n}": 8 for n in range(1025)}}, "rank_pattern is not a map of at most 1024"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"exclude_modules": [1]}, "exclude_modules is neither a pattern nor a list of names"),
        ({"exclude_modules": "(?=q)"}, "exclude_modules: the pattern .* has more than names"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"something_new": 3}, "something_new is not supported"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' is not supported"),
        ({"target_modules": ["embed_tokens"]}, "'embed_tokens' is not supported"),
        ({"target_modules": ["mlp.experts.0.up_proj"]}, "'mlp.experts.0.up_proj' is not supported"),
        ({"target_modules": []}, "neither a pattern nor a list of names"),
        ({"target_modules": ...}, "target_modules is missing"),
        ({"r": 0}, "r is 0, expected a whole number from 1 to 256"),
        ({"r": 257}, "r is 257, expected a whole number from 1 to 256"),
        ({"r": 65}, "r is 65, at most 64"),
        ({"r": 4.5}, "r is 4.5"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
        ({"layers_pattern": "blocks"}, "layers_pattern 'blocks' is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_more_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    write_adapter(tmp_path / "one", **changes)
    with pytest.raises(ModelError, match=f"adapter_config.json: .*{why}"):
        read(tmp_path)


def renamed(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def replaced(name: str, array: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(Q0), "lora_A of q_proj in layer 0 is missing"),
        (lambda tensors: tensors.clear(), "no tensors"),
        (renamed("0.self_attn.q_proj", "7.self_attn.q_proj"), "layer 7: the model has layers 0 to 1"),
        (renamed("0.self_attn.v_proj", "0.self_attn.k_proj"), "k_proj in layer 0 is not among"),
        (renamed("self_attn.q_proj", "mlp.q_proj"), "no factor of a supported linear layer"),
        (renamed("0.self_attn.q_proj", "00.self_attn.q_proj"), "no factor of a supported linear layer"),
        (renamed("self_attn.v_proj", "mlp.experts.3.up_proj"), "adapters of experts are not supported"),
        (replaced("base_model.model.lm_head.lora_A.weight", np.ones((4, 8), np.float32)), "the output layer"),
        (replaced("base_model.model.model.embed_tokens.lora_embedding_A", np.ones((4, 8), "f4")), "embed"),
        (replaced(Q0.replace("lora_A.weight", "lora_magnitude_vector"), np.ones(6, np.float32)), "DoRA"),
        (replaced(Q0.replace("lora_A.weight", "bias"), np.ones(6, np.float32)), "biases are not supported"),
        (replaced("left.over", np.ones(6, np.float32)), "'left.over': no factor"),
        (replaced(Q0, np.ones((5, 8), np.float32)), "are not \\[4, inputs\\] and \\[outputs, 4\\]"),
        (replaced(Q0, np.ones(4, np.float32)), "are not \\[4, inputs\\]"),
        (replaced(Q0, np.ones((4, 0), np.float32)), "are not \\[4, inputs\\]"),
        (replaced(Q0, np.ones((4, 9), np.float32)), "9 inputs and 6 outputs, the model's has 8 and 6"),
        (replaced(Q0, np.ones((4, 8), np.float64)), "unsupported dtype F64"),
        (replaced(Q0, np.full((4, 8), np.nan, np.float32)), "q_proj in layer 0 has values that are NaN"),
        (replaced(Q0, np.full((4, 8), np.inf, np.float16)), "NaN or infinite"),
        (replaced(Q0, np.full((4, 8), 0x7F80, np.uint16)), "NaN or infinite"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], why: str
) -> None:
    tensors = factors(FITTING)
    change(tensors)
    write_adapter(tmp_path / "one", tensors)
    with pytest.raises(ModelError, match=f"adapter_model.safetensors: .*{why}"):
        read(tmp_path, target=MODEL)


def test_a_layer_that_the_config_names_must_be_there(tmp_path: Path) -> None:
    half = {name: array for name, array in factors(FITTING).items() if ".1." not in name}
    write_adapter(tmp_path / "one", half)
    with pytest.raises(ModelError, match="q_proj in layer 1 is missing"):
        read(tmp_path, target=MODEL)
    write_adapter(tmp_path / "one", half, layers_to_transform=[0])
    assert len(read(tmp_path, target=MODEL).changes) == 2
    write_adapter(tmp_path / "one", half, target_modules=".*_proj")  # a pattern: the tensors say
    assert len(read(tmp_path, target=MODEL).changes) == 2
    write_adapter(tmp_path / "one", factors(FITTING), target_modules=["q_proj", "v_proj", "gate_proj"])
    with pytest.raises(ModelError, match="'gate_proj' is in no layer of the model"):
        read(tmp_path, target=MODEL)


def test_no_path_leads_out_of_the_directory(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "one")
    write_adapter(root / "group" / "two")
    write_adapter(tmp_path / "outside")
    (root / "link-inside").symlink_to("one")
    (root / "link-out").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to("loop")
    assert read(root, "group/two").fingerprint == read(root, "link-inside").fingerprint
    outside = str(tmp_path / "outside")
    for path in (
        "../outside",
        "one/../../outside",
        outside,
        "",
        ".",
        "..",
        "one/",
        "//one",
        "a\0b",
        "x" * 2000,
    ):
        with pytest.raises(PathRefused):
            read(root, path)
    with pytest.raises(PathRefused, match="leads out of"):
        read(root, "link-out")
    for path in ("three", "one/adapter_config.json", "loop", "é" * 300):
        with pytest.raises(NoSuchAdapter):
            read(root, path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_no_file_lies_outside_or_is_something_else(tmp_path: Path, name: str) -> None:
    root = tmp_path / "adapters"
    file = write_adapter(root / "one") / name
    file.rename(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}: No such file"):
        read(root)
    file.symlink_to(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}: leads out of"):
        read(root)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelError, match=f"{name}: not a regular file"):
        read(root)


def test_a_pickle_is_named_and_not_read(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "one")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle"):
        read(tmp_path)


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path / "one")
    size = (directory / "adapter_model.safetensors").stat().st_size
    assert read(tmp_path, max_bytes=size).rank == 4
    with pytest.raises(ModelError, match=r"safetensors: \d+ bytes, at most"):
        read(tmp_path, max_bytes=size - 1)
    (directory / "adapter_config.json").write_bytes(b" " * (1 << 20) + b"{}")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ModelError, match=r"json: \d+ bytes, at most"):
        read(tmp_path)


def test_a_header_that_promises_more_than_there_is_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_adapter(tmp_path / "one") / "adapter_model.safetensors"
    entry = {"dtype": "F32", "shape": [4, 1 << 40], "data_offsets": [0, 1 << 44]}
    header = json.dumps({Q0: entry}).encode()
    monkeypatch.setattr(np, "empty", None)
    for content in (b"", b"1234567", b"\xff" * 8, len(header).to_bytes(8, "little") + header):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            read(tmp_path)


@pytest.mark.parametrize("shared", [1, 64])
def test_tensors_that_share_bytes_are_refused_by_name(tmp_path: Path, shared: int) -> None:
    file = write_adapter(tmp_path / "one") / "adapter_model.safetensors"
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    *_, other, last = sorted(
        set(header) - {"__metadata__"}, key=lambda name: int(header[name]["data_offsets"][0])
    )
    header[last]["data_offsets"] = [place - shared for place in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])
    with pytest.raises(ModelError, match=f"'{re.escape(other)}' and '{re.escape(last)}' share bytes"):
        read(tmp_path)


def test_the_bytes_of_the_factors_are_asked_for_before_they_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = factors()
    write_adapter(tmp_path / "one", tensors)
    monkeypatch.setattr(np, "empty", None)
    asked: list[int] = []

    def refuse(size: int) -> None:
        asked.append(size)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        read_adapter(tmp_path, "one", ANY, b"model", BOUNDS, refuse)
    assert asked == [sum(array.nbytes for array in tensors.values())]


def test_room_is_asked_for_as_the_backend_will_hold_the_factors(tmp_path: Path) -> None:
    tensors = factors()
    write_adapter(tmp_path / "one", tensors)
    asked: list[tuple[int, list[tuple[int, str]], int]] = []

    def held(rank: int, changed: Iterable[tuple[int, str]], stored: int) -> int:
        asked.append((rank, sorted(changed), stored))
        return 12_345

    admitted: list[int] = []
    read_adapter(tmp_path, "one", AdapterTarget(held=held), b"model", BOUNDS, admitted.append)
    stored = sum(array.nbytes for array in tensors.values())
    assert asked == [(4, [(0, "q_proj"), (0, "v_proj")], stored)]
    assert admitted == [12_345]


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "one") / "adapter_model.safetensors"

    def cut() -> bool:
        os.truncate(file, 4096)
        return False

    with pytest.raises(ModelError, match="shorter than it was"):
        read_adapter(tmp_path, "one", ANY, b"model", BOUNDS, stop=cut)


def test_a_load_that_nobody_waits_for_stops_within_a_piece(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one")
    looks = iter((False, False, True))
    with pytest.raises(LoadStopped):
        read_adapter(tmp_path, "one", ANY, b"model", BOUNDS, stop=lambda: next(looks))
    assert next(looks, None) is None


def test_the_writer_of_these_files_writes_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = factors(QUERIES_AND_VALUES)
    write_tensors(tmp_path / "file", tensors)
    loaded = load_file(tmp_path / "file")
    assert all(np.array_equal(loaded[name], array) for name, array in tensors.items())
