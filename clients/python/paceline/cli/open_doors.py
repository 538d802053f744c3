"""Doors of `paceline serve` that stand open, as warnings."""

from __future__ import annotations

import asyncio

from paceline import aio, errors
from paceline.channel import is_loopback
from paceline.cli.client_options import TOKEN_VARIABLE
from paceline.cli.stack import Stack
from paceline.cli.wire import Speaks, admits_anyone, what_speaks

_TIMEOUT_S = 5.0


async def open_doors(stack: Stack) -> list[str]:
    """A line for each door of a stack that others may come through unasked.

    It is tried, not read from settings: they may come from options, variables and files.
    """
    host = stack.config.host
    beyond = not is_loopback(f"[{host.strip('[]')}]:0")
    try:
        plaintext = await asyncio.to_thread(what_speaks, stack.address, _TIMEOUT_S) is Speaks.HTTP2
    except OSError:  # an address that we can't reach ourselves says nothing
        plaintext = False
    warnings = []
    if plaintext and beyond:
        warnings.append(
            f"Plaintext on {host}: prompts, answers and tokens can be read on the network."
            " -S tls-cert=FILE -S tls-key=FILE encrypts them."
        )
    if await _needs_no_token(stack) and (plaintext or await _needs_no_certificate(stack)):
        who = "everybody who reaches it" if beyond else "every user of this machine"
        warnings.append(
            f"No token: {who} can send requests, and abort those of others without one."
            f" --token-file FILE or {TOKEN_VARIABLE} closes the door."
        )
    return warnings


async def _needs_no_token(stack: Stack) -> bool:
    async with aio.Client(stack.socket) as client:
        try:
            await client.model_info(timeout_s=_TIMEOUT_S)
        except errors.Unauthenticated:
            return False
        except errors.PacelineError:  # whatever it is, it came from behind the door
            return True
    return True


async def _needs_no_certificate(stack: Stack) -> bool:
    try:
        return await asyncio.to_thread(admits_anyone, stack.address, _TIMEOUT_S)
    except OSError:
        return True
