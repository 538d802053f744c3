"""`TorchBackend`: a model of one of `families.FAMILIES` as the engine's `Backend`."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from service_kit.logs import Log

from executor_service.adapters.weights import AdapterTarget, AdapterWeights
from executor_service.backends.base import (
    EmbeddingDefaults,
    EmbeddingPooling,
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    PendingForward,
    Progress,
    RowOutput,
    TokenizerBundle,
)
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.config import BLOCKS, TorchConfig
from executor_service.backends.torch_backend.files.architecture.rope.spec import served_length
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.embedding_files import (
    embedding_from_directory,
    embedding_from_gguf,
)
from executor_service.backends.torch_backend.files.finite import FiniteCheckpoint
from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.loading_thread import Beside
from executor_service.backends.torch_backend.files.partly_dequantized import KeptWeights
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.tokenizer_files import (
    tokenizer_from_directory,
    tokenizer_from_gguf,
)
from executor_service.backends.torch_backend.files.weights import Checkpoint, fingerprint, open_checkpoint
from executor_service.backends.torch_backend.kernel_choice import (
    check_spec,
    compilation,
    dependent_launch,
    make_kernels,
)
from executor_service.backends.torch_backend.memory import KV_BYTES, free_kv_bytes
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.runner import Numbers, Runner, Tell, tell_nobody
from executor_service.backends.torch_backend.model.shard import Shard, Whole
from executor_service.backends.torch_backend.model.slot_adapters import SlotAdapters
from executor_service.backends.torch_backend.model.uncached import (
    PAGE_SIZE,
    compile_kernels,
    forward_uncached,
    step_bytes,
)
from executor_service.backends.torch_backend.ops.kernels import Kernels
from executor_service.backends.torch_backend.ops.low_rank import LowRankKernels, parts_of
from executor_service.backends.torch_backend.ops.page_format import LayerCache, token_bytes
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds
from executor_service.files.json_file import read_json
from executor_service.files.model_card import ModelCard, card_of_directory, card_of_gguf

log = Log(__name__)


class TorchBackend:
    """Implements `Backend`."""

    info: ModelDescription

    def __init__(self, config: TorchConfig, shard: Shard | None = None, tell: Tell = tell_nobody) -> None:
        """`tell`: on rank 0 of several, how their runners learn what this one's does."""
        self._config, self._shard, self._tell = config, shard or Whole(), tell
        self._model: Model | None = None
        self._caches: list[LayerCache] = []
        self._page_size = PAGE_SIZE  # of the caches
        self._runner: Runner | None = None
        self._adapters: SlotAdapters | None = None
        self._adapter_bytes = 0  # of device memory
        self.max_piece_tokens = config.max_piece_tokens
        self.max_pending_forwards = 1

    def load(self, progress: Progress) -> None:
        """Read the weights, refuse NaN and infinity, arrange them for the kernels, and compile the kernels.

        Raises ModelError for files that are unreadable or of an unsupported model. Takes seconds to minutes.
        """
        with compilation(self._config.device, self._config.dtype, progress):
            with self._shard.loading():
                self._load(progress)
            progress("warming up", 0.0)
            compile_kernels(self.model, self._shard, self.info.context_length)

    def _load(self, progress: Progress) -> None:
        progress("opening model", 0.0)
        checkpoint = open_checkpoint(self._config.model, blocks=self._config.dtype == BLOCKS)
        try:
            whole = checkpoint.spec
            checkpoint.spec = whole.serving(self._config.max_context)
            if self._shard.rank == 0:
                _log_served_length(checkpoint.spec, whole.context_length)
            progress("loading kernels", 0.0)
            kernels = self._kernels()
            check_spec(checkpoint.spec, kernels, self._config.dtype)
            is_first_rank = self._shard.rank == 0  # the one that describes the model
            dtypes = self._config.arithmetic, str(kernels.cache_dtype)
            # Hashing a large model takes as long as reading it.
            with Beside(
                lambda progress: fingerprint(checkpoint, dtypes, progress) if is_first_rank else b""
            ) as hashing:
                with torch.inference_mode():
                    kept = KeptWeights(self._shard.cut(checkpoint), kernels.keeps)
                    self._model = Model(FiniteCheckpoint(kept, kernels.dtype), kernels, progress, self._shard)
                digest = hashing.result(progress)
            if kernels.low_rank is not None:
                self._adapters = self._new_adapters(kernels.low_rank)
        finally:
            checkpoint.close()
        if kept.dequantized:
            log.warning(
                f"{kept.quantization}: weights that no kernel multiplies are dequantized",
                dequantized=kept.dequantized,
                kept=kept.kept,
                dtype=self._config.dtype,
                device=self._config.device,
                weight_bytes=self._model.bytes(),
            )
        elif kept.kept:
            log.info(
                f"{kept.quantization}: quantized weights stay as the file has them",
                kept=kept.kept,
                dtype=self._config.dtype,
                kv=str(kernels.cache_dtype).removeprefix("torch."),
                weight_bytes=self._model.bytes(),
            )
        self.info = self._describe(checkpoint, digest)

    def tokenizer(self) -> TokenizerBundle:
        """The tokenizer's files. Raises ModelError when the model has none."""
        if self._config.model.is_dir():
            files = tokenizer_from_directory(self._config.model)
        else:
            with closing(GgufCheckpoint(self._config.model)) as checkpoint:
                files = tokenizer_from_gguf(checkpoint.file)
        defaults = {**files.generation_defaults, **self._config.sampling_defaults}
        return replace(files, generation_defaults=defaults)

    def offer_adapters(self, slots: int, max_bytes: int) -> None:
        """Keep so much device memory for adapters. On CPU, slots and memory are taken as they are needed."""
        self.adapters.reserve(slots)
        self._adapter_bytes = max_bytes

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        """Number of KV pages: on CUDA in free memory less the largest step's and adapters', else in 1 GiB."""
        device, free = self.model.kernels.device, KV_BYTES
        if device.type == "cuda":
            peak = step_bytes(self.model, self.info.context_length, rows, tokens)
            free = free_kv_bytes(device, self._adapter_bytes + peak)
        return free // self.page_bytes(page_size) - 1  # page 0 is scratch

    def page_bytes(self, page_size: int) -> int:
        return _kv_bytes(self.model.new_caches(1, page_size))

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate KV storage; no sequence uses page 0."""
        self._caches, self._page_size = self.model.new_caches(pages, page_size), page_size
        self._runner = self._new_runner(page_size)
        self.max_pending_forwards = self._runner.max_pending_forwards

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Capture frequent step shapes as CUDA graphs; do nothing without CUDA."""
        if self._config.graphs:
            self.runner.capture(rows, tokens, progress)

    def launch(self, rows: ForwardRows) -> PendingForward:
        """Start one forward over all rows."""
        return self.runner.launch(rows)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """One forward over all rows; one result per row, in the rows' order."""
        return list(self.runner.launch(ForwardRows(rows)).outputs())

    def repeat(self, message: Numbers) -> None:
        """On a rank above 0: this rank's part of what rank 0's runner announced."""
        self.runner.repeat(message)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's keys and values in every layer."""
        self.runner.copy_page(source, target)

    def prepare_adapter(self, weights: AdapterWeights) -> Any:
        """This rank's part of an adapter, as the kernels read it. Raises ModelError."""
        return self.adapters.pack(weights)

    def load_adapter(self, slot: int, prepared: Any) -> None:
        """Bring an adapter to a slot; nothing is copied."""
        self.adapters.load(slot, prepared)

    def unload_adapter(self, slot: int) -> None:
        """Forget what is in a slot."""
        self.adapters.unload(slot)

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """One result per input, without using the KV cache; `want`: of "hidden", "embedding", "logits"."""
        with torch.inference_mode(), self.model.kernels.step():
            return [
                forward_uncached(self.model, self._shard, tokens, want, self._page_size, view)
                for tokens in inputs
            ]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights and KV storage, and the peak of the process (on CUDA: of the device)."""
        cuda = self._config.device.startswith("cuda")
        peak = torch.cuda.max_memory_allocated() if cuda else _peak_rss_bytes()
        return {
            "weights": 0 if self._model is None else self._model.bytes(),
            "kv": _kv_bytes(self._caches),
            "peak": peak,
        }

    def live_bytes(self) -> dict[str, int]:
        """Activations by the shapes of the largest step; on CUDA also what is in use on the device."""
        live = {} if self._model is None else {"activations": self._model.activation_bytes}
        if self._config.device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(self._config.device)
            live["device"] = total - free
        return live

    def close(self) -> None:
        """Free graphs, weights, KV storage and threads."""
        if self._runner is not None:
            self._runner.close()
        if self._model is not None:
            self._model.kernels.close()
        self._model, self._caches, self._runner, self._adapters = None, [], None, None

    @property
    def runner(self) -> Runner:
        """Runs the steps; RuntimeError before `allocate`."""
        if self._runner is None:
            raise RuntimeError("no KV storage was allocated")
        return self._runner

    @property
    def model(self) -> Model:
        """The loaded model; RuntimeError before `load`."""
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model

    @property
    def adapters(self) -> SlotAdapters:
        """The slots; RuntimeError before `load`, and where `info.adapters` is None."""
        if self._adapters is None:
            raise RuntimeError("there are no adapters")
        return self._adapters

    @property
    def _runs_ahead(self) -> bool:
        """Whether a `DeviceRunner` runs the steps."""
        return self.model.kernels.device.type == "cuda"

    def _new_adapters(self, low_rank: LowRankKernels) -> SlotAdapters:
        spec, device = self.model.spec, self.model.kernels.device
        if self._runs_ahead:
            # Imported only here: Triton comes with torch's CUDA builds alone.
            from executor_service.backends.torch_backend.cuda.linear.device_adapters import DeviceSlots

            return DeviceSlots(spec, low_rank, self._shard, device)
        return SlotAdapters(spec, low_rank, self._shard)

    def _new_runner(self, page_size: int) -> Runner:
        if self._runs_ahead:
            from executor_service.backends.torch_backend.cuda.linear.device_adapters import DeviceSlots
            from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner

            assert isinstance(self._adapters, DeviceSlots)
            return DeviceRunner(
                self.model, self._caches, page_size, self._adapters, self._shard, self._tell,
                dependent=self._launches_dependently(),
            )  # fmt: skip
        return HostRunner(self.model, self._shard, self._caches, page_size, self._adapters, self._tell)

    def _kernels(self) -> Kernels:
        config, threads = self._config, self._config.threads or os.cpu_count() or 1
        kernels = make_kernels(config.device, config.dtype, config.kv_dtype, threads)
        self._launches_dependently()  # refuses what the device has not got
        return kernels

    def _launches_dependently(self) -> bool:
        device, wanted = torch.device(self._config.device), self._config.programmatic_dependent_launch
        return dependent_launch(device, wanted=wanted)

    def _describe(self, checkpoint: Checkpoint, digest: bytes) -> ModelDescription:
        spec = checkpoint.spec
        of_layer = token_bytes(self.model.spec.kv_heads, spec.head_dim, self.model.kernels.cache_dtype)
        on_cuda = self._config.device.startswith("cuda")
        embedding = self._embedding(checkpoint)
        windows = {spec.window_of(layer) for layer in range(spec.layers)}
        return ModelDescription(
            name=checkpoint.name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            parameters=sum(int(np.prod(shape)) for _, shape in expected_shapes(spec)),
            dtype=self._config.dtype,
            device=self._config.device,
            hidden_size=spec.vector_size,
            layers=spec.layers,
            kv_bytes_per_token=spec.layers * of_layer,
            eos_token_ids=spec.eos_token_ids,
            fingerprint=digest,
            can_forward=True,
            can_mask_forward=self.model.kernels.device.type == "cpu",
            can_sample=not spec.labels,
            can_score=not spec.labels,
            can_pool=embedding is not None,
            embedding=embedding or EmbeddingDefaults(),
            has_tokenizer=self._has_tokenizer(checkpoint),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_size=spec.head_dim,
            supported_dtypes=(
                "float32",
                "bfloat16",
                "float16",
                "int8",
                BLOCKS,
                *(["fp8"] if on_cuda else []),
            ),
            supported_devices=("cpu", *(("cuda",) if torch.cuda.is_available() else ())),
            adapters=None if self._adapters is None else self._target(spec, self._adapters),
            full_attention=0 in windows,
            attention_window=max(windows),
            card=self._card(checkpoint),
        )

    @staticmethod
    def _target(spec: ModelSpec, adapters: SlotAdapters) -> AdapterTarget:
        linears = {key: (part.inputs, part.outputs) for key, part in parts_of(spec).items()}
        return AdapterTarget(linears, adapters.bytes)

    def _embedding(self, checkpoint: Checkpoint) -> EmbeddingDefaults | None:
        if checkpoint.spec.labels:
            return EmbeddingDefaults(EmbeddingPooling.LAST, normalize=False)
        if isinstance(checkpoint, GgufCheckpoint):
            return embedding_from_gguf(checkpoint.file.metadata, self._config.model.name)
        return embedding_from_directory(self._config.model)

    def _card(self, checkpoint: Checkpoint) -> ModelCard:
        if isinstance(checkpoint, GgufCheckpoint):
            return card_of_gguf(checkpoint.file.metadata)
        return card_of_directory(self._config.model, read_json(self._config.model / "config.json"))

    def _has_tokenizer(self, checkpoint: Checkpoint) -> bool:
        if isinstance(checkpoint, GgufCheckpoint):
            return "tokenizer.ggml.model" in checkpoint.file.metadata
        return (self._config.model / "tokenizer.json").is_file()


def _log_served_length(spec: ModelSpec, longest: int) -> None:
    """Say which factors rotate all tokens, where that depends on the served context."""
    if (served := served_length(spec.rope, spec.context_length, longest)) is not None:
        tell = log.warning if served.differs else log.info
        tell(
            "rotary embedding of all prompts",
            used=served.used,
            context=spec.context_length,
            change=served.change,
        )


def _kv_bytes(caches: Sequence[LayerCache]) -> int:
    return sum(cache.nbytes for cache in caches)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
