"""Errors of the tokenizer processes, as clients get them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError, invalid, unsupported
from scheduler_service.text.errors import BusyError, ChatTemplateUnusable, PromptError, StuckError


@contextmanager
def text_errors(field: str) -> Iterator[None]:
    """Errors of the tokenizer processes as ServiceError. `field`: what is at fault if they don't say."""
    try:
        yield
    except PromptError as error:
        raise invalid(error.field or field, str(error)) from error
    except ChatTemplateUnusable as error:
        raise unsupported(error.field or field, str(error)) from error
    except BusyError as error:
        raise ServiceError(ErrorReason.QUEUE_FULL, str(error), retry_after_s=RETRY_AFTER_S) from error
    except StuckError as error:
        raise ServiceError(ErrorReason.INTERNAL, str(error)) from error
