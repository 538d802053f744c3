"""A GGUF model in several parts is the model of the whole file, and parts that do not fit are refused."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.examine import examined
from executor_service.backends.torch_backend.files.gguf_parts import open_gguf
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import fingerprint, open_checkpoint
from executor_service.backends.torch_backend.memory import planned_bytes
from tests.unit.executor.model_files import write_gguf

PARTS = [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
FIRST, SECOND, THIRD = PARTS
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The folder of a model in three parts, of 8, 8 and 4 tensors."""
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(folder / "model.gguf", split=8)
    assert sorted(os.listdir(folder)) == PARTS
    return folder


def digest_of(path: Path) -> bytes:
    with closing(open_checkpoint(path)) as checkpoint:
        return fingerprint(checkpoint, ["float32"], lambda what, done: None)


def patch(file: Path, key: str, value: int) -> None:
    """Write another value of a key, in the place of the present one."""
    data = bytearray(file.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    struct.pack_into({2: "<H", 5: "<i"}[data[at]], data, at + 4, value)
    file.write_bytes(data)


def rewrite(file: Path, alignment: int = 0, **keys: int) -> None:
    """The same part as another program may have written it."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for key, value in keys.items():
        writer.add_uint32(key.replace("__", "."), value)
    if alignment:
        writer.add_custom_alignment(alignment)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").rename(file)


@pytest.mark.parametrize("quantized", [None, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("given", PARTS)
def test_any_part_is_the_model_of_the_whole_file(
    given: str, quantized: gguf.GGMLQuantizationType | None, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", quantized=quantized)
    write_gguf(tmp_path / "model.gguf", quantized=quantized, split=8)
    whole: Any = open_checkpoint(tmp_path / "model.gguf", blocks=True)
    found: Any = open_checkpoint(tmp_path / given, blocks=True)
    with closing(whole), closing(found):
        assert (found.name, found.spec) == (whole.name, whole.spec)
        for name, _ in expected_shapes(whole.spec):
            assert torch.equal(found.read(name), whole.read(name)), name
            ours, theirs = found.read_weight(name), whole.read_weight(name)
            assert type(ours) is type(theirs)
            assert torch.equal(getattr(ours, "numbers", ours), getattr(theirs, "numbers", theirs))
        assert [file.name for file in found.files()] == PARTS
    facts = examined(tmp_path / given)
    assert facts["problem"] == ""
    sizes = [(tmp_path / part).stat().st_size for part in PARTS]
    assert facts["stored_bytes"] == sum(sizes)
    planned = [
        planned_bytes(TorchConfig(tmp_path / name, device="cuda"), None, None, 16)
        for name in ("model.gguf", given)
    ]
    assert planned[1] - planned[0] == sum(sizes) - (tmp_path / "model.gguf").stat().st_size


def test_the_fingerprint_is_of_all_parts_whichever_is_given(parts: Path) -> None:
    digests = {digest_of(parts / part) for part in PARTS}
    assert len(digests) == 1
    data = bytearray((parts / SECOND).read_bytes())
    data[-1] ^= 1
    (parts / SECOND).write_bytes(data)
    assert digest_of(parts / FIRST) not in digests


def test_parts_may_be_links_to_files_of_other_names(parts: Path, tmp_path: Path) -> None:
    """As in Hugging Face's cache."""
    whole = digest_of(parts / FIRST)
    for i, part in enumerate(PARTS):
        shutil.move(parts / part, tmp_path / f"blob{i}")
        (parts / part).symlink_to(Path("..") / f"blob{i}")
    assert digest_of(parts / THIRD) == whole


def test_a_file_that_says_one_part_needs_no_name(parts: Path) -> None:
    write_gguf(parts / "other.gguf")
    with pytest.raises(ModelError, match="is not that of one of as many parts"):
        open_gguf((parts / FIRST).rename(parts / "model.gguf"))
    shutil.copy(parts / "other.gguf", parts / FIRST)  # without the keys, the name says nothing
    with closing(open_checkpoint(parts / FIRST)) as checkpoint:
        assert checkpoint.files() == [parts / FIRST]


@pytest.mark.parametrize(
    "name",
    [
        "model-1-of-3.gguf",
        "model-00001-of-00004.gguf",
        "model-00000-of-00003.gguf",
        "model-00004-of-00003.gguf",
        "model-０００01-of-00003.gguf",
        "model-00001-of-00003.gguf.gguf",
        "-00001-of-00003.gguf",
        "model-00001-of-00003\n.gguf",
    ],
)
def test_a_part_by_another_name_is_refused(parts: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"split\.count 3, but its name"):
        open_checkpoint((parts / FIRST).rename(parts / name))


def _twice(folder: Path) -> None:
    data, name = (folder / THIRD).read_bytes(), b"blk.1.ffn_up.weight"
    assert data.count(name) == 1
    (folder / THIRD).write_bytes(data.replace(name, b"blk.0.ffn_up.weight"))


def _no_file(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


def _of_four_parts(folder: Path) -> None:
    write_gguf(folder / "other.gguf", split=5)
    (folder / "other-00002-of-00004.gguf").rename(folder / SECOND)


def _of_more_tensors(folder: Path) -> None:
    write_gguf(folder / "other.gguf", split=8, tensors=["more"])
    (folder / "other-00002-of-00003.gguf").rename(folder / SECOND)


def _of_all(key: str, value: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for part in PARTS:
            patch(folder / part, key, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is missing: the model has 3 parts"),
        (_no_file, f"{SECOND} is missing"),
        (lambda folder: (folder / THIRD).write_bytes(b""), f"{THIRD}: truncated: 0 bytes"),
        (lambda folder: os.truncate(folder / SECOND, 3000), f"{SECOND}: tensor 'blk"),
        (lambda folder: (folder / SECOND).write_bytes(bytes(99)), f"{SECOND}: not a GGUF file"),
        (lambda folder: shutil.copy(folder / THIRD, folder / SECOND), f"{SECOND}: split.no is 2, expected 1"),
        (lambda folder: shutil.copy(folder / SECOND, folder / FIRST), f"{FIRST}: split.no is 1, expected 0"),
        (_of_four_parts, f"{SECOND}: split.count is 4, expected 3: no part 2 of this model"),
        (_of_more_tensors, f"{SECOND}: split.tensors.count is 21, expected 20"),
        (lambda folder: write_gguf(folder / THIRD), f"{THIRD}: split.no is 'None', expected 2"),
        (lambda folder: rewrite(folder / SECOND, llama__rope=1), f"{SECOND}: llama.rope is 1, expected"),
        (lambda folder: rewrite(folder / SECOND, llama__block_count=3), "llama.block_count is 3, expected 2"),
        (_twice, f"{THIRD}: tensor 'blk.0.ffn_up.weight' is there twice"),
        (_of_all(TENSORS, 21), f"{FIRST}: split.tensors.count 21: all parts have 20"),
        (_of_all(TENSORS, 12), f"{SECOND}: split.tensors.count 12: there are more"),
        (_of_all(TENSORS, 1 << 30), f"{FIRST}: split.tensors.count is 1073741824, expected a number"),
        (_of_all(COUNT, 65_535), f"{FIRST}: split.count 65535, but its name"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_by_name(
    parts: Path, change: Callable[[Path], object], said: str
) -> None:
    change(parts)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(parts / FIRST)
    assert said in str(caught.value)


def test_a_part_may_have_an_alignment_of_its_own_but_none_is_guessed(parts: Path) -> None:
    """gguf's writer aligns all parts alike and says so in the first one alone; llama.cpp reads 32 there."""
    with closing(open_gguf(parts / FIRST)) as file:
        expected = {name: file.read(name) for name in file.tensors}
    rewrite(parts / SECOND, alignment=128)
    with closing(open_gguf(parts / FIRST)) as file:
        assert all(np.array_equal(file.read(name), values) for name, values in expected.items())
    rewrite(parts / FIRST, alignment=64)
    with pytest.raises(ModelError, match=f"{THIRD}: general.alignment is missing"):
        open_gguf(parts / FIRST)
