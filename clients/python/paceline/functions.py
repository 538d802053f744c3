"""Tools from Python functions and pydantic models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from paceline.chat import Tool
from paceline.schemas import json_schema


def tool_of(function: Callable[..., Any]) -> Tool:
    """The tool that is a function with type hints, or a pydantic model whose fields are the arguments.

    Its name and docstring become the tool's name and description. A function needs pydantic, which derives
    the schema of its arguments. Raises TypeError if that is not possible.
    """
    name = getattr(function, "__name__", "")
    if not name:  # as of a functools.partial
        raise TypeError(f"{type(function).__name__} has no name: give a Tool or a function")
    schema = json_schema(function if isinstance(function, type) else _arguments_of(function, name))
    # Not inspect.getdoc: without a docstring of its own, a model has that of pydantic's base class.
    return Tool(name, inspect.cleandoc(function.__doc__ or ""), schema)


def _arguments_of(function: Callable[..., Any], name: str) -> Any:
    try:
        import pydantic  # optional, and slow to import
    except ImportError:
        raise TypeError(
            f"{name}() is a function: pydantic derives its schema; pip install pydantic"
        ) from None
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(cast(Any, function))
        if adapter.json_schema().get("type") != "object":
            raise TypeError(f"{name}() has arguments without names")
    except pydantic.errors.PydanticUserError as error:  # a hint without a schema
        raise TypeError(f"{name}(): {error.message}") from error
    return adapter
