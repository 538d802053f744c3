"""50 grammars in the syntax that llguidance and the Python package `lark` share.

Where a text can be cut into terminals in several ways, the engine may know fewer of them than Lark's Earley
parser, never more: so what it lets pass must parse.
"""

from __future__ import annotations

import random
import re

_TERMINALS = {"INT": "/0|[1-9][0-9]{0,3}/", "WORD": "/[a-z]{1,8}/"}
"""Appended to the grammars that use them."""

_WRITTEN = r"""
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: INT | "(" sum ")"

start: list
list: "[" [item ("," item)*] "]"
item: INT | list

start: object
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
value: STRING | INT | object | "true" | "null"
STRING: /"[a-z ]{0,10}"/

start: "a" start "b" | "ab"

start: p "."
p: "(" p ")" p | "x"

start: sexp
sexp: ATOM | "(" sexp (" " sexp)* ")"
ATOM: /[a-z]{1,5}/

start: row ("\n" row)* "\n"
row: cell ("," cell)*
cell: WORD | INT

start: "SELECT " names " FROM " WORD [" WHERE " test (" AND " test)*] ";"
names: WORD (", " WORD)*
test: WORD OP INT
OP: "=" | "<" | ">"

start: greeting " " name "!"
greeting: "Hello" | "Hi" | "Dear"
name: /[A-Z][a-z]{1,9}/

start: year "-" month "-" day
year: /[12][0-9]{3}/
month: /0[1-9]|1[0-2]/
day: /0[1-9]|[12][0-9]|3[01]/

start: "if " cond ":" stmt ["else:" stmt]
cond: WORD "==" INT
stmt: WORD "=" INT ";" | start

start: "<" WORD ">" body "</" WORD ">"
body: (TEXT | start)*
TEXT: /[a-zA-Z ]{1,20}/

start: "1" start "1" | "0" start "0" | "x"

start: call
call: WORD "(" [arg ("," " " arg)*] ")"
arg: INT | call | STRING
STRING: /"[^"\n\\]{0,10}"/

start: move+ ["1-0" | "0-1"]
move: /[KQRBN]?[a-h][1-8]/ " "

start: line~2..4
line: "- " /[a-z ]{3,12}/ "\n"

start: "M"? "C"~0..2 "X"~1..3 "I"~0..3 "."

start: "\"" key "\": " INT
key: /[a-z]{1,6}/

start: (A | B)+ C
A: "aa"
B: "b"
C: "!"

start: a b? c*
a: "1" | "2"
b: "-"
c: "x" a

start: expr
expr: "not " expr | expr " and " expr | WORD

start: "let " WORD " = " expr ";"
expr: INT | expr "+" expr

start: "ü" x "€"
x: /[äöß]{1,3}/ | "日本"

start: T
T: "a".."f" ("0".."9")+ "."

start: X Y
X: /[a-z]{3}/
Y: /[0-9]{2}/

start: (digit ".")* "end"
digit: "0" | "1" | "2"

start: "[" start* "]"

start: header item+
header: "# " WORD "\n"
item: "* " WORD "\n"

start: "{" (WORD "=" INT ";")* "}"

start: path
path: ("/" WORD)+ ["?" query]
query: WORD "=" INT ("&" WORD "=" INT)*
"""


def larks() -> list[str]:
    """All of them; the same ones each time."""
    rng = random.Random(9)
    written = [block + _used(block) for block in _WRITTEN.strip().split("\n\n")]
    return [*written, *(_drawn(rng) for _ in range(50 - len(written)))]


def _used(grammar: str) -> str:
    """The terminals that it uses, as lines."""
    used = [name for name in _TERMINALS if re.search(rf"\b{name}\b", grammar)]
    return "".join(f"\n{name}: {_TERMINALS[name]}" for name in used)


def _drawn(rng: random.Random) -> str:
    """A few rules over one another; none refers to itself but by way of brackets, so every text ends."""
    names = ["start", "alpha", "beta", "gamma"]
    rules = []
    for index, name in enumerate(names):
        later = names[index + 1 :]
        alternatives = [
            " ".join(_symbol(rng, later) for _ in range(rng.randrange(1, 4)))
            for _ in range(rng.randrange(1, 4))
        ]
        if index == 0:
            alternatives.append('"<" start ">"')
        alternatives.append(rng.choice(['"."', "NUMBER", '"ab" WORD']))
        rules.append(f"{name}: {' | '.join(alternatives)}")
    return "\n".join([*rules, "NUMBER: /[0-9]{1,3}/", "WORD: /[a-z]{2,5}/"])


def _symbol(rng: random.Random, later: list[str]) -> str:
    symbol = rng.choice([*later, *later, '"-"', '"("', "NUMBER", "WORD", '" and "', '"é"'])
    return symbol + rng.choice(["", "", "", "?", "*", "+", "~1..2"])
