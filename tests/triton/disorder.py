"""Whether a compiled kernel waits for the kernel before it, in programmatic dependent launches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

_CONTROL = "griddepcontrol."
_WAIT, _SIGNAL = f"{_CONTROL}wait", f"{_CONTROL}launch_dependents"
_BODY = re.compile(r"^\.visible \.entry .*?^\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_INERT = re.compile(r"\$L__(tmp|func_begin)\d+:$|\.")  # labels of debuggers, and directives
_LEAVES = re.compile(r"(@\S+ )?(bra|brx|ret|exit|call)\b|\S+:$")  # a basic block: another one begins
_MEMORY = re.compile(r"(@\S+ )?(ld|st|cp|atom|red|multimem|prefetch)\w*\.(?!param)")
_PREFETCH = re.compile(r"(?:@\S+ )?prefetch\.global\.L2 \[\s*(%\w+)(?:\+-?\d+)?\s*\]$")
_ADDRESS = re.compile(r"\.param \.u64 \.ptr \S+ (?:\.align \d+ )?(\w+_param_(\d+))")
_INSTRUCTION = re.compile(r"(@\S+ )?\S+\s+(\{[^}]*\}|[^,]+),?(.*)$")
_LABEL = re.compile(r"\$\w+")
_NAME = re.compile(r"%?\w+")


def disorder(ptx: str, *, dependent: bool, weights: Collection[int] = ()) -> str:
    """What is wrong with the kernel's order; "" if nothing is.

    In dependent launches it waits once, before any access to memory and on every path, and lets the next
    kernel start at that place or further down, once and on every path. In plain launches it does neither.
    Before it waits it may ask for what lies at its parameters `weights`, by their numbers, and for nothing
    else: kernels write the others.
    """
    code = _code(ptx)
    controls = [line for line in code if _CONTROL in line]
    if not dependent:
        early = [line for line in code if "prefetch" in line]
        return "it waits for a kernel in plain launches" if controls or early else ""
    if not controls:
        return "it does not wait for the kernel before"
    if controls != [_WAIT, _SIGNAL]:
        return f"it does not wait and signal once each: {', '.join(controls)}"
    before, behind = code[: code.index(_WAIT)], code[code.index(_WAIT) :]
    if any(map(_LEAVES.match, before)) or _is_passed(code, code.index(_SIGNAL)):
        return "it does not wait and signal on every path"
    if any(_MEMORY.match(line) and not _PREFETCH.match(line) for line in before):
        return "it touches memory before it waits"
    if any(len(found) != 1 or not found <= {*weights} for found in _asked(ptx, before)):
        return "it asks for what is no weight before it waits"
    return "it asks for weights behind its wait" if any(map(_PREFETCH.match, behind)) else ""


def prefetches(ptx: str) -> int:
    """How many addresses a thread asks for before it waits."""
    code = _code(ptx)
    before = code[: code.index(_WAIT)] if _WAIT in code else []
    return sum(_PREFETCH.match(line) is not None for line in before)


def _is_passed(code: list[str], place: int) -> bool:
    """Whether a path comes to the end without this instruction, or to it twice."""
    labels = {line.removesuffix(":"): at for at, line in enumerate(code) if line.endswith(":")}
    for at, line in enumerate(code):
        if not _LEAVES.match(line) or line.endswith(":"):
            continue
        targets = [labels[name] for name in _LABEL.findall(line) if name in labels]
        if (not targets and at < place) or any((at < place) != (target <= place) for target in targets):
            return True
    return False


def _code(ptx: str) -> list[str]:
    """The kernel's instructions, and the labels of its basic blocks."""
    found = _BODY.search(ptx)
    assert found is not None, "no kernel"
    bare = (part.strip() for line in found[1].splitlines() for part in line.split("//")[0].split(";"))
    return [part for part in bare if part and not _INERT.match(part)]


def _asked(ptx: str, before: list[str]) -> list[set[int]]:
    """For each address that is asked for, the numbers of the parameters with addresses that it follows from.

    `before`: instructions without branches. Each writes what it names first, in braces if that is several.
    """
    addresses = {name: int(number) for name, number in _ADDRESS.findall(ptx)}
    sources: defaultdict[str, set[int]] = defaultdict(set)
    asked = []
    for line in before:
        if found := _PREFETCH.match(line):
            asked.append(sources[found[1]])
        elif instruction := _INSTRUCTION.match(line):
            maybe, written, read = instruction.groups()
            names = _NAME.findall(f"{maybe or ''} {read}")
            known = {addresses[name] for name in names if name in addresses}
            known = known.union(*(sources[name] for name in names))
            for name in _NAME.findall(written):
                sources[name] = known | (sources[name] if maybe else set())
    return asked
