"""Whether a compiled kernel waits for the kernel before it, in programmatic dependent launches."""

from __future__ import annotations

import re

_CONTROL = "griddepcontrol."
_WAIT, _SIGNAL = f"{_CONTROL}wait", f"{_CONTROL}launch_dependents"
_BODY = re.compile(r"^\.visible \.entry .*?^\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_INERT = re.compile(r"\$L__(tmp|func_begin)\d+:$|\.")  # labels of debuggers, and directives
_LEAVES = re.compile(r"(@\S+ )?(bra|brx|ret|exit|call)\b|\S+:$")  # a basic block: another one begins
_MEMORY = re.compile(r"(@\S+ )?(ld|st|cp|atom|red|multimem|prefetch)\w*\.(?!param)")


def disorder(ptx: str, *, dependent: bool) -> str:
    """What is wrong with the kernel's order; "" if nothing is.

    In dependent launches it waits once, before any access to memory and on every path, and then lets the next
    kernel start, once and on every path. In plain launches it does neither.
    """
    found = _BODY.search(ptx)
    assert found is not None, "no kernel"
    bare = (line.split("//")[0].strip().rstrip(";") for line in found[1].splitlines())
    code = [line for line in bare if line and not _INERT.match(line)]
    controls = [line for line in code if _CONTROL in line]
    if not dependent:
        return "it waits for a kernel in plain launches" if controls else ""
    if not controls:
        return "it does not wait for the kernel before"
    if controls != [_WAIT, _SIGNAL]:
        return f"it does not wait and signal once each: {', '.join(controls)}"
    before = code[: code.index(_WAIT)]
    if any(map(_MEMORY.match, before)):
        return "it touches memory before it waits"
    if any(map(_LEAVES.match, code[: code.index(_SIGNAL)])):
        return "it does not wait and signal on every path"
    return ""
