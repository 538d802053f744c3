"""What installed packages add to Paceline: entry points of the groups in GROUPS, imported when used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

BACKENDS = "paceline.backends"
CHAT_FORMATS = "paceline.chat_formats"
GROUPS = {BACKENDS: "backend", CHAT_FORMATS: "chat format"}
"""The groups of entry points, with the word for one of their members."""


class PluginError(ValueError):
    """A plugin is missing, ambiguous, or can't be loaded; the message names it and its package."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    kind: str
    entry: EntryPoint

    @property
    def name(self) -> str:
        """The name under which users ask for it."""
        return self.entry.name

    @property
    def package(self) -> str:
        """Name and version of the distribution that has it."""
        return f"{self.entry.dist.name} {self.entry.dist.version}" if self.entry.dist else "unknown package"

    def load(self) -> Any:
        """What the entry point refers to; imports its module. Raises PluginError."""
        try:
            return self.entry.load()
        except Exception as error:  # code of others may raise anything
            raise self.fault(error) from error

    def fault(self, error: Exception) -> PluginError:
        """An error of this plugin, with its name and package."""
        return PluginError(
            f"{self.kind} plugin {self.name} ({self.package}): {type(error).__name__}: {error}"
        )


def installed(group: str) -> tuple[Plugin, ...]:
    """The group's plugins by name; none of them is imported."""
    found = entry_points(group=group)
    return tuple(Plugin(GROUPS[group], entry) for entry in sorted(found, key=lambda entry: entry.name))


def find(group: str, name: str) -> Plugin:
    """The plugin of this name. Raises PluginError if there is none, or if two packages have one."""
    found = [plugin for plugin in installed(group) if plugin.name == name]
    if not found:
        raise PluginError(f"no installed package has a {GROUPS[group]} {name!r} (entry points {group})")
    if len(found) > 1:
        packages = " and ".join(plugin.package for plugin in found)
        raise PluginError(f"several packages have a {GROUPS[group]} {name!r}: {packages}")
    return found[0]
