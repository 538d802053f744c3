"""`Runtime`: loads the model, drains, and knows what state the service is in.

Made and read on the event loop; `_load` and `_progress` run on the device thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import hashlib
import json
import secrets
import time
from dataclasses import dataclass

from service_kit.logs import Log

from executor_service.backends.base import (
    AdapterBackend,
    Backend,
    ModelDescription,
    ModelError,
    TokenizerBundle,
)
from executor_service.backends.factory import make_backend
from executor_service.backends.resident import resident_bytes
from executor_service.cache.session import Leases
from executor_service.config import ExecutorConfig
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Reason, RequestRefused
from executor_service.runtime.adapter_loader import AdapterLoader
from executor_service.runtime.grammars import (
    COMPILE_FUEL,
    MAX_GRAMMAR_BYTES,
    STEP_FUEL,
    GrammarCompiler,
    grammar_compiler,
)
from executor_service.steps.engine import Engine
from executor_service.steps.worker import DeviceWorker

log = Log(__name__)

_STOP_S = 5.0
_DRAIN_POLL_S = 0.02
_FAILED_S = 1.0  # from a failed load to the process's end; a scheduler asks twice a second
_MAX_PAGES = (1 << 31) - 2  # page numbers are int32, and page 0 is scratch


class RuntimeState(enum.Enum):
    """Loading, then serving, then draining, in this order only; or loading, then failed."""

    LOADING = "loading"
    FAILED = "failed"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is loaded."""

    engine: Engine
    info: ModelDescription
    limits: Limits
    tokenizer: TokenizerBundle | None
    vocabulary_fingerprint: bytes
    grammars: GrammarCompiler | None
    adapters: AdapterLoader | None
    at_s: int  # when, in seconds since 1970


class Runtime:
    """The model, engine and device thread of a process."""

    def __init__(self, config: ExecutorConfig, backend: Backend) -> None:
        self.config = config
        self.epoch = secrets.randbits(63) | 1
        self.started_s = time.monotonic()
        self.worker = DeviceWorker(config.max_queued_steps)
        self.loading, self.load_fraction = "starting", 0.0
        self.backend = backend
        self.changed = asyncio.Event()  # `state` is another one than when the event was cleared
        self._memory_bytes: dict[str, int] = {}
        self._loaded: Loaded | None = None
        self._draining = self._failed = False

    @classmethod
    def from_config(cls, config: ExecutorConfig) -> Runtime:
        """The runtime of a configuration. Raises ModelError."""
        return cls(config, make_backend(config.backend_settings, config.follower_flags))

    @property
    def state(self) -> RuntimeState:
        """The state of the service."""
        if self._failed:
            return RuntimeState.FAILED
        if self._draining:
            return RuntimeState.DRAINING
        return RuntimeState.LOADING if self._loaded is None else RuntimeState.SERVING

    @property
    def stuck(self) -> bool:
        """Whether a step has had the device for longer than `stuck_after_s`."""
        return self._loaded is not None and self.worker.busy_s > self.config.stuck_after_s

    @property
    def loaded(self) -> Loaded:
        """The loaded model. Raises RequestRefused (UNAVAILABLE) while it is loading."""
        if self._loaded is None:
            raise RequestRefused(
                Reason.LOADING, f"not ready: {self.loading} ({self.load_fraction:.0%}); try again later"
            )
        return self._loaded

    @property
    def loaded_or_none(self) -> Loaded | None:
        """The loaded model; None while it is loading."""
        return self._loaded

    async def load(self) -> None:
        """Load the model on the device thread. A model that can't be served ends the process.

        Whoever asks for the state within _FAILED_S hears why.
        """
        began = time.monotonic()
        engine = await self.worker.start(self._load_or_tell)
        engine.store.draining = self._draining
        self.changed.set()
        log.info(
            "the model is loaded",
            model=self.loaded.info.name,
            seconds=round(time.monotonic() - began, 2),
            pages=engine.limits.total_pages,
            memory_bytes=self.memory(),
        )

    def drain(self) -> None:
        """Refuse to open sequences from now on."""
        self._draining = True
        self.changed.set()
        if self._loaded is not None:
            self._loaded.engine.store.draining = True

    async def drained(self, timeout_s: float) -> int:
        """Wait until there are no sequences, at most `timeout_s`; returns how many are left."""
        deadline = time.monotonic() + timeout_s
        while self.sequences and time.monotonic() < deadline:  # noqa: ASYNC110  # changed by a thread
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.sequences

    def close(self) -> None:
        """End the device thread after its queue. A step that hangs ends with the process."""
        if self._loaded is not None and self._loaded.grammars is not None:
            self._loaded.grammars.close()
        if self._loaded is not None and self._loaded.adapters is not None:
            self._loaded.adapters.close()
        if self._loaded is not None and self.worker.stop(timeout_s=_STOP_S):
            self.backend.close()

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return 0 if self._loaded is None else self._loaded.engine.store.count

    @property
    def weight_bytes(self) -> int:
        """Memory that the loaded weights take."""
        return self._memory_bytes.get("weights", 0)

    def memory(self) -> dict[str, int]:
        """Bytes by use: weights, pages and the peak after loading; activations, processes and device now.

        "kv" is all pages, of which those never taken are not resident on CPU. "overhead" is what of this
        process's resident memory weights, pages and activations do not explain; on a device with memory of
        its own they are there, and explain nothing of it.
        """
        if self._loaded is None:
            return {**self._memory_bytes, "process": resident_bytes()}
        live, own = self.backend.live_bytes(), resident_bytes()
        explained = 0
        if "device" not in live:
            pages = self._loaded.engine.store.pages
            kv = self._memory_bytes.get("kv", 0) * pages.touched // (pages.total + 1)
            explained = self.weight_bytes + kv + live.get("activations", 0)
        return {
            **self._memory_bytes,
            "activations": live.get("activations", 0),
            "overhead": max(own - explained, 0),
            "process": own + live.pop("ranks", 0),
            **live,
        }

    def _load_or_tell(self) -> Engine:
        """Load, or say why not before the process ends; device thread."""
        try:
            return self._load()
        except Exception as error:
            known = isinstance(error, ModelError)
            self.loading = str(error) if known else "the device thread failed; the executor's log has more"
            self._failed = True
            time.sleep(_FAILED_S)
            raise

    def _load(self) -> Engine:
        """Load the model and make the engine; device thread."""
        backend, config = self.backend, self.config
        backend.load(self._progress)
        info = backend.info
        adapts = config.adapter_dir is not None
        if adapts and (info.adapters is None or not isinstance(backend, AdapterBackend)):
            raise ModelError("this backend has no adapters; leave out --adapter-dir")
        if adapts:
            backend.offer_adapters(config.adapter_slots, config.adapter_memory)
        tokenizer = backend.tokenizer() if info.has_tokenizer else None
        self._progress("preparing grammars", 1.0)
        grammars = grammar_compiler(tokenizer, info) if info.can_sample else None
        pages = self._pages()
        limits = Limits(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            page_size=config.page_size,
            total_pages=pages,
            max_sequences=config.max_sequences,
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_in_flight=config.max_in_flight,
            max_piece_tokens=config.max_piece_tokens or backend.max_piece_tokens,
            max_queued_steps=config.max_queued_steps,
            max_logprobs=min(20, info.vocab_size),
            max_sessions_per_caller=config.max_sessions_per_caller,
            max_default_pages=max(1, int(pages * config.session0_fraction)),
            max_default_sequences=max(1, int(config.max_sequences * config.session0_fraction)),
            max_grammar_bytes=MAX_GRAMMAR_BYTES if grammars else 0,
            max_grammar_compile_fuel=COMPILE_FUEL if grammars else 0,
            max_grammar_step_fuel=STEP_FUEL if grammars else 0,
            max_adapters=config.max_adapters if adapts else 0,
            max_adapter_slots=config.adapter_slots if adapts else 0,
            max_adapter_rank=config.max_adapter_rank if adapts else 0,
            max_adapter_bytes=config.adapter_memory if adapts else 0,
            can_sample=info.can_sample,
            can_score=info.can_score,
            hidden_size=info.hidden_size if info.can_pool else 0,
        )
        self._progress("allocating KV pages", 1.0)
        backend.allocate(pages + 1, config.page_size)  # page 0 is scratch
        backend.capture(config.max_rows, config.max_step_tokens, self._progress)
        leases = Leases(default_s=config.lease_ms / 1000)
        engine = Engine(backend, limits, self.epoch, leases, replay_clock=time.thread_time)
        self._memory_bytes = backend.memory_bytes()
        vocabulary = vocabulary_fingerprint(tokenizer.tokenizer_json) if tokenizer else b""
        adapters = None
        if config.adapter_dir is not None and info.adapters is not None:
            assert isinstance(backend, AdapterBackend)
            root, store = config.adapter_dir, engine.store.adapters
            adapters = AdapterLoader(
                root, backend, info.fingerprint, info.adapters, limits, self.worker, store
            )
        at_s = int(time.time())
        self._loaded = Loaded(engine, info, limits, tokenizer, vocabulary, grammars, adapters, at_s)
        give_back_freed()
        self._progress("", 1.0)
        return engine

    def _progress(self, what: str, fraction: float) -> None:
        self.loading, self.load_fraction = what, min(max(fraction, 0.0), 1.0)

    def _pages(self) -> int:
        """Number of KV pages: as configured, or as many as memory holds. Raises ModelError for none."""
        config = self.config
        if config.pages is not None:
            return min(config.pages, _MAX_PAGES)
        page_bytes = self.backend.page_bytes(config.page_size)
        if config.kv_memory is None:
            pages = self.backend.default_pages(config.page_size, config.max_rows, config.max_step_tokens)
        else:
            pages = config.kv_memory // page_bytes - 1
        if pages < 1:
            room = "the memory left" if config.kv_memory is None else f"--kv-memory {config.kv_memory}"
            raise ModelError(f"{room} does not hold two KV pages of {page_bytes} bytes")
        return min(pages, _MAX_PAGES)


def give_back_freed() -> None:
    """Return freed memory to the system.

    glibc keeps it for later allocations: after the default model is loaded 75 MB, mostly dequantized weights
    that were packed since. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def vocabulary_fingerprint(tokenizer_json: bytes) -> bytes:
    """SHA-256 over the tokens of a tokenizer.json and their ids.

    It covers neither how text is split nor how the file is formatted, so that a GGUF file and a directory of
    the same model have the same one, nor the padding that GGUF converters add: a token `[PADn]` with id n.
    """
    tokenizer = json.loads(tokenizer_json)
    tokens = tokenizer["model"]["vocab"]
    if isinstance(tokens, dict):
        ids = {int(i): str(token) for token, i in tokens.items()}
    else:  # Unigram: [token, score] in the order of ids
        ids = {i: str(token) for i, (token, _) in enumerate(tokens)}
    ids |= {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens") or ()}
    known = [[i, token] for i, token in sorted(ids.items()) if token != f"[PAD{i}]"]
    return hashlib.sha256(json.dumps(known).encode()).digest()
