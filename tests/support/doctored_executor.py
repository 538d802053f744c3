"""The oracle with another chat template or tokenizer, for tests of what a scheduler makes of them.

`python -m tests.support.doctored_executor --doctored FILE ...` is an executor whose tokenizer files are the
oracle's but for those in FILE, a JSON object of `chat_template` and `tokenizer_json` (strings).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from executor_service.__main__ import main
from executor_service.backends.base import TokenizerBundle
from executor_service.backends.byte_tokenizer import byte_tokenizer
from executor_service.backends.oracle_backend.oracle import OracleBackend
from tests.support.processes import ServiceProcess
from tests.support.stack import ORACLE, Stack


@contextmanager
def doctored_executor(
    directory: Path, *arguments: str, chat_template: str | None = None, tokenizer_json: str | None = None
) -> Iterator[str]:
    """Its address; it serves."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "files.json"
    file.write_text(json.dumps({"chat_template": chat_template, "tokenizer_json": tokenizer_json}))
    process = ServiceProcess(__name__, [*ORACLE, *arguments, "--doctored", str(file)], directory)
    try:
        yield process.wait_serving().address
    finally:
        process.kill()


@contextmanager
def doctored_stack(
    directory: Path,
    *,
    executor: Sequence[str] = (),
    scheduler: Sequence[str] = (),
    chat_template: str | None = None,
    tokenizer_json: str | None = None,
) -> Iterator[Stack]:
    """A scheduler in front of one."""
    stack = Stack(directory)
    with doctored_executor(
        directory / "doctored", *executor, chat_template=chat_template, tokenizer_json=tokenizer_json
    ) as address:
        try:
            stack.start_scheduler(*scheduler, executors=[address])
            stack.scheduler.wait_serving()
            yield stack
        finally:
            stack.kill()


def _doctor(file: Path) -> None:
    given = json.loads(file.read_text())
    files = byte_tokenizer()
    if given["chat_template"] is not None:
        files = replace(files, chat_template=given["chat_template"])
    if given["tokenizer_json"] is not None:
        files = replace(files, tokenizer_json=given["tokenizer_json"].encode())

    def tokenizer(backend: OracleBackend) -> TokenizerBundle:
        return files

    OracleBackend.tokenizer = tokenizer  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    at = sys.argv.index("--doctored")
    _doctor(Path(sys.argv[at + 1]))
    del sys.argv[at : at + 2]
    sys.exit(main())
