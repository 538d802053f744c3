"""`ChatFormats`: which format of calls a model has, of Paceline's own or of an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator
from service_kit.plugins import CHAT_FORMATS, Plugin, PluginError, find

from scheduler_service.chat.formats import AUTO, FORMATS, NONE, ToolFormat, format_of, takes_tools


class ChatFormats:
    """What --tool-format names. Raises PluginError, a ValueError, if nobody has it or it can't be loaded.

    A package's entry point of the group `paceline.chat_formats` is a function that makes a `ToolFormat` of
    the ids of the tokenizer's added tokens: of `formats.MARKERS`, and of the texts of its own attribute
    `markers`. It returns None if the model lacks what the format needs.
    """

    def __init__(self, setting: str = AUTO) -> None:
        self.setting = setting
        self._plugin: Plugin | None = None
        self._make: Any = None
        self.markers: tuple[str, ...] = ()
        """A package's own texts to look for among the added tokens."""
        if setting not in (AUTO, NONE, *FORMATS):
            self._plugin, self._make = _loaded(setting)
            self.markers = tuple(getattr(self._make, "markers", ()))
            are_texts = all(isinstance(one, str) and len(one) > 1 for one in self.markers)
            if not (callable(self._make) and are_texts):
                wrong = TypeError("it is no function with a sequence of texts as its markers")
                raise self._plugin.fault(wrong)

    def format_of(self, template: str, added: Mapping[str, int]) -> ToolFormat | None:
        """The model's, by its chat template and its added tokens; None: it has none. Raises PluginError."""
        if self._plugin is None:
            return format_of(template, added, self.setting)
        if not takes_tools(template):
            return None
        try:
            made = self._make(added)
            if not isinstance(made, ToolFormat | None):
                raise TypeError(f"it made a {type(made).__name__}, and no ToolFormat")
        except Exception as error:  # code of others may raise anything
            raise self._plugin.fault(error) from error
        return made


def _loaded(name: str) -> tuple[Plugin, Any]:
    try:
        plugin = find(CHAT_FORMATS, name)
    except PluginError as error:
        own = ", ".join((AUTO, NONE, *sorted(FORMATS)))
        raise PluginError(f"{error}; Paceline's own are {own}") from error
    return plugin, plugin.load()


def _known(name: str) -> str:
    return ChatFormats(name).setting


ToolFormatSetting = Annotated[str, AfterValidator(_known)]
"""`auto`, `none` or a format's name; a package's format is imported once to see whether it can be."""
