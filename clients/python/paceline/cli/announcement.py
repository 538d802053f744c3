"""What `serve` says once it serves: where, and what to type next."""

from __future__ import annotations

from pathlib import Path

from paceline_router.models import ModelState

from paceline import aio, errors
from paceline.cli.common import DEFAULT_ADDRESS, stderr, with_token
from paceline.cli.several_models.stacks import ModelStacks
from paceline.cli.stack import Stack
from paceline.executor.v1.executor_pb2 import CAPABILITY_CLASSIFIER

_CALL_TIMEOUT_S = 5.0


def announce(stack: Stack, port_file: Path | None) -> None:
    """Say where the model is served."""
    config = stack.config
    if port_file is not None:
        port_file.write_text(f"{stack.scheduler.port}\n")
    draft = f", drafts from {config.draft.label}" if config.draft else ""
    stderr.print(
        f"Serving [bold]{config.name or config.executor.label}[/] at"
        f" [bold]{stack.address}[/] (executor at {stack.executor_address}{draft}). Ctrl-C stops.",
        highlight=False,
        soft_wrap=True,
    )
    if config.gateway is not None:
        config.gateway.announce(stack.gateways[0].port, "" if config.demands_token else ", without a key")


def announce_models(stacks: ModelStacks, port_file: Path | None) -> None:
    """Say where the models are served."""
    host = stacks.config.host.strip("[]")
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    port = stacks.router.port
    if port_file is not None:
        port_file.write_text(f"{port}\n")
    up = [one.name for one in stacks.models if one.state is ModelState.SERVING]
    rest = [one.name for one in stacks.models if one.state is ModelState.AVAILABLE]
    further = f" (on demand: {', '.join(rest)})" if rest else ""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    stderr.print(
        f"Serving [bold]{', '.join(up)}[/] at [bold]{address}[/]{further}. Ctrl-C stops.",
        highlight=False,
        soft_wrap=True,
    )
    if (gateway := stacks.config.gateway) is not None:
        gateway.announce(stacks.gateways[0].port, "" if stacks.config.demands_token else ", without a key")
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    first = (up or rest)[0]
    command = with_token("paceline", needed=stacks.config.demands_token)
    stderr.print(
        f'[dim]Try: paceline ps; {command} generate{where} --model {first} --chat "Why is the sky blue?"[/]',
        highlight=False,
        soft_wrap=True,
    )


async def tell_what_to_try(stack: Stack) -> None:
    """Print a command to try, a chat if there is a template, and the sampling of requests that set none."""
    async with aio.ExecutorClient(stack.executor_socket, security=stack.executor_security) as executor:
        try:
            tokenizer = await executor.get_tokenizer(timeout_s=_CALL_TIMEOUT_S)
            info = await executor.get_info(timeout_s=_CALL_TIMEOUT_S)
        except errors.PacelineError:  # it has none, or has just died: then there is nothing to tell
            return
    chat = "--chat " if tokenizer.chat_template else ""
    where = "" if stack.address == DEFAULT_ADDRESS else f"--address {stack.address} "
    generates = CAPABILITY_CLASSIFIER not in info.capabilities
    call = f"generate {where}{chat}" if generates else f"embed {where}"
    command = with_token("paceline", needed=stack.config.demands_token)
    stderr.print(f'[dim]Try: {command} {call}"Why is the sky blue?"[/]', highlight=False, soft_wrap=True)
    if not generates:
        return
    defaults = dict(tokenizer.generation_defaults)
    defaults.setdefault("temperature", 1.0)  # as the contract says
    words = ", ".join(f"{name} {value:.4g}" for name, value in sorted(defaults.items(), reverse=True))
    stderr.print(f"[dim]Sampling, where a request sets none: {words}[/]", highlight=False, soft_wrap=True)
