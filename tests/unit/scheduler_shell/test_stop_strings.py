"""Stop strings: found wherever tokens are cut; text before the match goes out, nothing after."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_service.text.stop_strings import StopMatcher, StopStrings

few_letters = st.text("ab日", max_size=12)
stops = st.lists(st.text("ab日", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, strings: list[str]) -> tuple[str, str | None]:
    """By definition: the first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], strings: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(strings))
    out = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        out += text
        if found is not None:
            return out, found
    return out + matcher.flush(), None


@given(st.lists(few_letters, max_size=8), stops)
@example(["ab", "ab", "b"], ["abb", "bab"])
def test_any_split_gives_the_text_before_the_first_match(pieces: list[str], strings: list[str]) -> None:
    assert run(pieces, strings) == expected("".join(pieces), strings)


@given(few_letters, stops)
def test_only_a_possible_beginning_is_held_back(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(StopStrings(strings))
    out, found = matcher.push(text)
    if found is None:
        held = text[len(out) :]
        starts = [text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) for s in strings)]
        assert held == max(starts, key=len, default="")


def test_held_text_that_becomes_no_stop_string_is_sent() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("d") == ("ENd", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.flush() == "EN"
