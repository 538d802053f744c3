"""`open_gguf`: the GGUF file of a model, or all parts of one that was split, as if they were one.

llama.cpp's converter and `llama-gguf-split` write the parts: files of one folder, NAME-00001-of-00003.gguf
and so on. The first one has the metadata, each has its own tensors, and the keys `split.*` of each say which
part of how many it is.
"""

from __future__ import annotations

from pathlib import Path

from service_kit.model_name import MAX_PARTS, gguf_parts

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.gguf_file import MAX_TENSORS, GgufFile
from executor_service.files.fields import shown

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_ALIGNMENT = "general.alignment"  # each file's own


def open_gguf(path: Path) -> GgufFile:
    """The file; of any part of a model the first one, with the tensors of all. Raises ModelError, OSError."""
    file = GgufFile(path)
    count = file.metadata.get(_COUNT, 0)
    if count in (0, 1):
        return file
    try:
        names = gguf_parts(path.name)
        if count != len(names):
            raise file.fault(
                f"{_COUNT} {shown(count)}, but its name is not that of one of as many parts, of at most"
                f" {MAX_PARTS}: NAME-00001-of-00003.gguf"
            )
        parts = [path.with_name(name) for name in names]
        for part in parts:
            if not part.is_file():
                raise ModelError(f"{part.name} is missing: the model has {count} parts")
        if path != parts[0]:
            file.close()
            file = GgufFile(parts[0])
        _check(file, file, 0)
        for number, part in enumerate(parts[1:], 1):
            _join(file, GgufFile(part), number)
        if len(file.tensors) != file.metadata[_TENSORS]:
            raise file.fault(f"{_TENSORS} {file.metadata[_TENSORS]}: all parts have {len(file.tensors)}")
    except (ModelError, OSError):
        file.close()
        raise
    return file


def _join(first: GgufFile, part: GgufFile, number: int) -> None:
    """Make the tensors of part `number` those of the first one, too."""
    first.others.append(part)  # which is closed with it, whatever follows
    _check(part, first, number)
    for name in part.tensors:
        if name in first.tensors:
            raise part.fault(f"tensor {name!r} is there twice: it is in another part, too")
    first.tensors |= part.tensors
    if len(first.tensors) > first.metadata[_TENSORS]:
        raise part.fault(f"{_TENSORS} {first.metadata[_TENSORS]}: there are more in the parts up to this one")
    part.metadata, part.tensors = {}, {}  # so that many parts take no more memory than one


def _check(part: GgufFile, first: GgufFile, number: int) -> None:
    """Refuse a part of another model, or with metadata that the first one has not."""
    expected = first.metadata | {_NUMBER: number}
    tensors = expected.get(_TENSORS)
    if type(tensors) is not int or not 0 <= tensors <= MAX_TENSORS:
        raise first.fault(f"{_TENSORS} is {shown(tensors)}, expected a number up to {MAX_TENSORS}")
    if _ALIGNMENT not in part.metadata and first.metadata.get(_ALIGNMENT, 32) != 32:
        raise part.fault(
            f"{_ALIGNMENT} is missing: writers differ in which one parts have that do not say it"
        )
    for key in (_NUMBER, _COUNT, _TENSORS, *part.metadata):
        if key != _ALIGNMENT and part.metadata.get(key) != expected.get(key):
            found, wanted = shown(part.metadata.get(key)), shown(expected.get(key))
            raise part.fault(f"{key[:80]} is {found}, expected {wanted}: no part {number + 1} of this model")
