"""`python -m scheduler_service.text.worker.examine [MEMORY_MIB CPU_S]`: whether a tokenizer can be used.

Reads the files that an executor has for schedulers as a JSON object from standard input, and prints one:
why the tokenizer or the template can't be used (""), and what chats can do. The files are strangers': the
kernel ends this process where it would end a scheduler's tokenizer process, by default with default settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from scheduler_service.chat import formats, reasoning
from scheduler_service.text.frames import CPU_S, MEMORY_MIB
from scheduler_service.text.worker import limits
from scheduler_service.text.worker.encoder import Encoder, Files


def examined(sent: Mapping[str, Any]) -> dict[str, object]:
    """`problem` of the tokenizer, `template_problem`, and the output that is read in chats."""
    files = Files(**{**sent, "tokenizer_json": sent["tokenizer_json"].encode()})
    template, found = files.chat_template, {"problem": "", "template_problem": ""}
    try:
        encoder = Encoder(files)
    except MemoryError:
        raise
    except BaseException as error:  # `tokenizers` raises Exception, and PanicException
        if not template:
            return {**found, "problem": str(error) or type(error).__name__}
        without = examined({**sent, "chat_template": ""})
        return without if without["problem"] else {**without, "template_problem": str(error)}
    added = encoder.added_tokens(formats.MARKERS + reasoning.MARKERS)
    tools, whole = formats.format_of(template, added), formats.whole_format_of(template, added)
    return {
        **found,
        "chat": bool(template),
        "takes_tools": formats.takes_tools(template),
        "tool_format": "" if tools is None else tools.name,
        "reasoning": whole is not None or reasoning.reasoning_markers(template, added) is not None,
    }


def main(memory_mib: int = MEMORY_MIB, cpu_s: float = CPU_S) -> None:
    """Set the limits, then answer."""
    limits.die_with_parent()
    limits.limit_memory(memory_mib)
    limits.extend_cpu(cpu_s)
    print(json.dumps(examined(json.load(sys.stdin))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
