"""Token ids of several texts and chats of one request: a hundred documents are one job."""

from __future__ import annotations

import json
from array import array
from typing import Any

from scheduler_service.text.worker.chat_template import ChatTemplateError, RenderedTooLargeError
from scheduler_service.text.worker.encoder import Encoder
from scheduler_service.text.worker.sent_json import Chat, SentJsonError, parsed_chat


class ItemError(Exception):
    """An item can't be tokenized. `field`: where it stands in the request."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def item_ids(encoder: Encoder, payload: bytes, max_bytes: int) -> tuple[array[int], array[int]]:
    """The number of ids of each item in the payload of a job, and all their ids, in order.

    `max_bytes`: of one rendered chat. Raises ItemError.
    """
    counts, ids = array("I"), array("I")
    for item in json.loads(payload):
        encoded = _encoded(encoder, item, max_bytes)
        if not encoded:
            raise ItemError("has no tokens", item["field"])
        counts.append(len(encoded))
        ids += encoded
    return counts, ids


def _encoded(encoder: Encoder, item: dict[str, Any], max_bytes: int) -> array[int]:
    field: str = item["field"]
    if "text" in item:
        return encoder.encode_text(item["text"], begins=item["begins"])
    if "whole" in item:
        ids, is_added = encoder.encode_whole(item["whole"])
        if item["varies"] and is_added:
            raise ItemError(
                "begins with a token that the tokenizer puts before every text, so that all texts have the "
                "same vector with POOLING_CLS",
                field,
            )
        return ids
    try:
        return encode_chat(encoder, parsed_chat(item["chat"]), max_bytes)
    except RenderedTooLargeError:
        raise ItemError(f"the template makes more than {max_bytes} bytes of it", field) from None
    except (ChatTemplateError, SentJsonError) as error:
        raise ItemError(str(error), field + error.field.removeprefix("messages")) from error


def encode_chat(encoder: Encoder, chat: Chat, max_bytes: int) -> array[int]:
    """Ids of a chat. Raises as Encoder.encode_messages, and SentJsonError."""
    try:
        return encoder.encode_messages(
            chat.messages,
            max_bytes,
            arguments=chat.arguments,
            tools=chat.tools,
            continues=chat.continues,
            opens=chat.opens,
        )
    except ChatTemplateError as error:
        if not chat.unparsed:
            raise
        raise SentJsonError(
            f"is no JSON object, so the chat template gets its text, and fails: {error}. Send {{}} in its "
            "place, or leave the call and its answer out",
            chat.unparsed,
        ) from error
