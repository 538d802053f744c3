"""A model that calls Python functions: run what it calls, and give it the results, until it answers in text.

    paceline serve ~/models/Qwen3-8B &
    python examples/tool_loop.py 127.0.0.1:50051 "Which is larger, 17 * 23 or 19 * 21?"

Functions with type hints are tools; pydantic derives the schema of their arguments. The model is shown what
was wrong with a call, and may try again. One that max_tokens cut off ends the conversation: InvalidOutput.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paceline import Client, Completion, Delta, Message, ToolCall
from pydantic import ValidationError, validate_call


def calculate(left: float, operation: Literal["+", "-", "*", "/"], right: float) -> float:
    """The result of one operation on two numbers."""
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right


def result_of(call: ToolCall, tools: dict[str, Callable[..., Any]]) -> object:
    """What the called function returns, or what was wrong with the call. Raises InvalidOutput."""
    if call.name not in tools:
        return {"error": f"there is no tool {call.name}"}
    arguments = call.parsed
    try:
        return validate_call(tools[call.name])(**arguments)
    except (ValidationError, ArithmeticError) as error:
        return {"error": str(error)}


def streamed(client: Client, messages: Sequence[Message], **options: Any) -> Completion:
    """The model's answer, printed as it comes."""
    with client.generate(messages=messages, max_tokens=500, **options) as generation:
        for event in generation:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    return generation.collect()[0]


def converse(
    client: Client, question: str, functions: Sequence[Callable[..., Any]], max_rounds: int = 4
) -> list[Message]:
    """The whole conversation. In the last round the model must answer in text."""
    tools = {function.__name__: function for function in functions}
    messages = [Message("user", question)]
    for left in reversed(range(max_rounds)):
        answer = streamed(client, messages, tools=functions, tool_choice="auto" if left else "none")
        messages.append(answer.message())
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = result_of(call, tools)
            print(f"{call.name} {call.arguments} -> {result}")
            messages.append(call.answer(result))
    print()
    return messages


def main() -> None:
    """Ask a question that needs a tool."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    question = " ".join(sys.argv[2:]) or "What is 17 * 23?"
    with Client(address) as client:
        if client.model_info().tool_format:
            converse(client, question, [calculate])
        else:
            print("This model has no tool calls.")


if __name__ == "__main__":
    main()
