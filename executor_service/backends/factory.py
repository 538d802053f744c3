"""Makes the backend that the settings describe; imports no other backend's libraries."""

from __future__ import annotations

from collections.abc import Sequence

from service_kit.plugins import BACKENDS, find

from executor_service.backends.base import Backend, ModelError
from executor_service.backends.oracle_backend.settings import OracleSettings, ScriptSettings
from executor_service.backends.settings import BackendSettings, PagedAttentionSettings, PluginSettings
from executor_service.backends.torch_backend.settings import TorchSettings


def make_backend(settings: BackendSettings, follower_flags: Sequence[str] = ()) -> Backend:
    """The backend of these settings, not loaded yet. Raises ModelError.

    `follower_flags`: command line of the follower ranks, for tensor parallelism.
    """
    try:
        match settings:
            case ScriptSettings():
                from executor_service.backends.oracle_backend.scripted_oracle import ScriptedOracle

                return ScriptedOracle(settings)
            case OracleSettings():
                from executor_service.backends.oracle_backend.clocked_oracle import oracle_of

                return oracle_of(settings)
            case PagedAttentionSettings():
                from executor_service.backends.reference.paged_attention import (
                    PagedAttentionBackend,
                    PagedAttentionConfig,
                )

                return PagedAttentionBackend(
                    PagedAttentionConfig(settings.vocab_size, settings.context_length)
                )
            case TorchSettings():
                from executor_service.backends.torch_backend.factory import torch_backend

                return torch_backend(settings, follower_flags)
            case PluginSettings():
                return _of_plugin(settings)
    except ValueError as error:
        raise ModelError(str(error)) from error
    raise TypeError(f"no backend has settings of type {type(settings).__name__}")


def _of_plugin(settings: PluginSettings) -> Backend:
    """What the plugin's entry point makes of the options. Raises PluginError, whatever the plugin raises."""
    plugin = find(BACKENDS, settings.backend)
    make = plugin.load()
    try:
        backend: Backend = make(settings.backend_options)
    except Exception as error:  # code of others may raise anything
        raise plugin.fault(error) from error
    return backend
