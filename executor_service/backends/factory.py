"""From a configuration to a backend. Imports a backend's libraries only when it is asked for."""

from __future__ import annotations

from executor_service.backends.base import Backend, ModelError
from executor_service.config import ExecutorConfig


def make_backend(config: ExecutorConfig) -> Backend:
    """The backend that the configuration names, not loaded yet. Raises ModelError."""
    try:
        if config.backend == "oracle":
            return _oracle(config)
        if config.backend == "paged-attention":
            return _paged_attention(config)
        return _torch(config)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _oracle(config: ExecutorConfig) -> Backend:
    from executor_service.backends.clocked_oracle import oracle_of
    from executor_service.backends.oracle import OracleConfig

    return oracle_of(
        OracleConfig(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            draft_agreement=config.draft_agreement,
            draft_seed=config.draft_seed,
            step_ms=config.step_ms,
            token_us=config.token_us,
            nan_on_token=config.nan_on_token,
            exit_on_token=config.exit_on_token,
            exit_after_steps=config.exit_after_steps,
            freeze_after_steps=config.freeze_after_steps,
        )
    )


def _paged_attention(config: ExecutorConfig) -> Backend:
    from executor_service.backends.paged_attention import PagedAttentionBackend, PagedAttentionConfig

    return PagedAttentionBackend(
        PagedAttentionConfig(vocab_size=config.vocab_size, context_length=config.context_length)
    )


def _torch(config: ExecutorConfig) -> Backend:
    from executor_service.backends.torch_factory import torch_backend

    return torch_backend(config)
