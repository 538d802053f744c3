"""100 regular expressions that mean the same to Rust's `regex` and to Python's `re`.

None has `\\w`, `\\s` or `\\b`, which the two define by different tables of Unicode. The second half is drawn
from a grammar of expressions.
"""

from __future__ import annotations

import random

WRITTEN = (
    r"yes|no",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    r"[A-Z][a-z]+ [A-Z][a-z]+",
    r"[a-z0-9._%+-]{1,20}@[a-z0-9-]{1,12}\.(com|org|net)",
    r"https?://[a-z]{2,10}\.[a-z]{2,3}(/[a-z0-9]{1,8}){0,3}",
    r"#[0-9a-fA-F]{6}",
    r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}",
    r"[01]+",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    r"M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})\.",
    r"(ab|cd|ef){2,5}",
    r"(a|b)*c",
    r"a{3}b{2,4}c?",
    r"(monday|tuesday|wednesday|thursday|friday)",
    r"([0-9]|1[0-2]):[0-5][0-9] (AM|PM)",
    r"v[0-9]+\.[0-9]+\.[0-9]+(-(alpha|beta|rc)\.[0-9]+)?",
    r"\$[1-9][0-9]{0,2}(,[0-9]{3})*\.[0-9]{2}",
    r"[a-z]+(_[a-z]+)*",
    r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,2}",
    r'"[^"\\\n]{0,30}"',
    r"'([^'\\\n]|\\.){0,20}'",
    r"<b>[^<>]{1,20}</b>",
    r"[^aeiou\n]{1,10}",
    r"(Paris|London|Berlin), [0-9]{1,2} million",
    r"The answer is (yes|no|[0-9]{1,3})\.",
    r"(one|two|three)( and (one|two|three)){0,3}",
    r"[äöüß]{1,5}",
    r"(é|è|ê){2}[a-z]",
    r"[日月火水木金土]曜日",
    r"(😀|😁|👍){1,3}",
    r"[α-ω]{2,6}",
    r"\x41\x42[\x43-\x45]{2}",
    r"a\.b\*c\+d\?",
    r"\[[0-9]{1,2}(, [0-9]{1,2}){0,4}\]",
    r"\{\}|\{[a-z]:[0-9]\}",
    r"(?:GET|POST) /[a-z]{0,10} HTTP/1\.[01]",
    r"([a-f0-9]{2}:){5}[a-f0-9]{2}",
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    r"(0x[0-9A-F]{1,8}|0b[01]{1,8})",
    r"[a-z]{1,3}([+*/-][a-z]{1,3}){1,4}",
    r"- [^\n]{1,30}\n- [^\n]{1,30}\n",
    r"([^\n]{0,20}\n){2}end",
    r"(?i)hello( world)?[!1]{0,3}",
    r"a*b*c*d",
    r"(x+y)+z?",
    r"((a|b)(c|d)){3}",
    r"[^\x00-\x7f]{1,4}",
    r".{1,40}",
    r"(.|\n){3,30}",
)
assert len(WRITTEN) == 50


def regexes() -> list[str]:
    """All of them; the same ones each time."""
    rng = random.Random(7)
    drawn = [_drawn(rng, 3) for _ in range(150)]
    return [*WRITTEN, *dict.fromkeys(one for one in drawn if 4 < len(one) < 80)][:100]


def _drawn(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice(["a", "bc", "[a-f]", "[^x\\n]", "[0-9]", "é", r"\.", " ", "[A-Z]", "the", "-"])
    first, second = _drawn(rng, depth - 1), _drawn(rng, depth - 1)
    low = rng.randrange(3)
    return rng.choice(
        [
            first + second,
            first + second,
            f"({first}|{second})",
            f"({first}){{{low},{low + rng.randrange(1, 4)}}}",
            f"({first})?{second}",
            f"{second}({first})+",
        ]
    )
