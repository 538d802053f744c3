"""Scores in place of answers: which of some texts is the likeliest after a prompt?

    paceline serve &
    python examples/scoring.py 127.0.0.1:50051

The way in which multiple-choice benchmarks ask a model. Nothing is generated: all choices are computed side
by side, and their common prompt once. Longer texts have lower logprobs, so choices of different lengths
are compared by the mean of their tokens' logprobs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline import Client, TextToScore

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a kind of cheese"]),
    ("Two and two are", [" four", " five", " the Eiffel Tower"]),
    ("At night, the sky is", [" dark", " green", " made of bread"]),
]


def likeliest(client: Client, prompt: str, choices: Sequence[str]) -> tuple[int, list[float]]:
    """(index of the likeliest choice, each choice's mean logprob per token)."""
    reply = client.score([TextToScore(text, prompt=prompt) for text in choices])
    means = [scored.logprob / len(scored.token_ids) for scored in reply.texts]
    return max(range(len(means)), key=means.__getitem__), means


def main() -> None:
    """Ask a few questions, and print what the model finds likely."""
    with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
        for prompt, choices in QUESTIONS:
            best, means = likeliest(client, prompt, choices)
            print(prompt)
            for index, (text, mean) in enumerate(zip(choices, means, strict=True)):
                print(f"  {'>' if index == best else ' '} {mean:7.2f} {text}")


if __name__ == "__main__":
    main()
