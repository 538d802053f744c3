"""`TorchBackend`: a Llama, Qwen2, Qwen3 or Qwen3-MoE model behind the engine's `Backend` border."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelError,
    ModelInfo,
    Progress,
    RowOutput,
    TokenizerFiles,
)
from executor_service.backends.torch_backend import sampler
from executor_service.backends.torch_backend.batch import lay_out
from executor_service.backends.torch_backend.kernels import (
    CpuInt8Kernels,
    CpuKernels,
    Kernels,
    LayerCache,
    PlainKernels,
)
from executor_service.backends.torch_backend.model import Model
from executor_service.backends.torch_backend.shard import Shard, Whole
from executor_service.backends.torch_backend.tokenizer_files import (
    tokenizer_from_directory,
    tokenizer_from_gguf,
)
from executor_service.backends.torch_backend.weights import (
    Checkpoint,
    GgufCheckpoint,
    expected_shapes,
    fingerprint,
    open_checkpoint,
)
from executor_service.plan import OutputMode, Sampling, TokenIds

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,  # of all but the weights
}
_WARMUP_PAGE = 16  # tokens
_LOGITS_ROWS = 256  # output positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """Which model, where and how."""

    model: Path  # a Hugging Face directory or a GGUF file
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0  # of CPU arithmetic; 0: one a core

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        if self.threads < 0:
            raise ValueError(f"threads {self.threads} is negative")


class TorchBackend:
    """Implements `Backend`; as there, one thread makes all calls."""

    info: ModelInfo

    def __init__(self, config: TorchConfig, shard: Shard | None = None) -> None:
        self._config, self._shard = config, shard or Whole()
        self._model: Model | None = None
        self._caches: list[LayerCache] = []
        self._page_size = 0

    def load(self, progress: Progress) -> None:
        """Read, check and pack the weights, and compile the kernels. Raises ModelError."""
        with self._shard.loading():
            self._load(progress)
        progress("warming up", 0.0)
        self._warm_up()
        progress("ready", 1.0)

    def _load(self, progress: Progress) -> None:
        progress("opening model", 0.0)
        checkpoint = open_checkpoint(self._config.model)
        try:
            progress("compiling kernels", 0.0)  # or reading them, after the first start
            kernels = self._kernels()
            answers = self._shard.rank == 0
            digest = fingerprint(checkpoint, self._config.dtype, progress) if answers else b""
            with torch.inference_mode():
                self._model = Model(self._shard.cut(checkpoint), kernels, progress, self._shard)
        finally:
            checkpoint.close()
        self.info = self._describe(checkpoint, digest)

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer's files. Raises ModelError when the model has none."""
        if self._config.model.is_dir():
            return tokenizer_from_directory(self._config.model)
        checkpoint = GgufCheckpoint(self._config.model)
        try:
            return tokenizer_from_gguf(checkpoint.file)
        finally:
            checkpoint.close()

    def allocate(self, pages: int, page_size: int) -> None:
        """Make KV storage; page 0 is never used by a sequence."""
        self._page_size = page_size
        self._caches = self.model.new_caches(pages, page_size)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Compute all rows in one pass; the result is in their order."""
        model = self.model
        with torch.inference_mode(), model.kernels.step():
            batch = lay_out(rows, self._page_size, model.kernels.device)
            hidden = model.hidden(batch, self._caches)
            results: list[RowOutput] = []
            begin = 0
            for part in _parts(rows):
                end = begin + sum(row.outputs for row in part)
                if end > begin:
                    results += self._shard.answer(model.logits(hidden[begin:end]), part, model.kernels)
                else:
                    results += [RowOutput() for _ in part]
                begin = end
            return results

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's KV in every layer."""
        with torch.inference_mode():
            for cache in self._caches:
                cache.k[target] = cache.k[source]
                cache.v[target] = cache.v[source]

    def forward_once(self, inputs: Sequence[TokenIds], want: frozenset[str]) -> list[ForwardOutput]:
        """Compute inputs without touching the cache; `want`: "hidden", "embedding", "logits"."""
        with torch.inference_mode(), self.model.kernels.step():
            return [self._forward_alone(tokens, want) for tokens in inputs]

    def memory_bytes(self) -> dict[str, int]:
        """Live sizes of weights and KV storage, and the process's (on CUDA: the device's) peak."""
        cuda = self._config.device.startswith("cuda")
        peak = torch.cuda.max_memory_allocated() if cuda else _peak_rss_bytes()
        return {
            "weights": 0 if self._model is None else self._model.bytes(),
            "kv": sum(cache.k.nbytes + cache.v.nbytes for cache in self._caches),
            "peak": peak,
        }

    def close(self) -> None:
        """Let go of weights, KV storage and threads."""
        if self._model is not None:
            self._model.kernels.close()
        self._model, self._caches = None, []

    @property
    def model(self) -> Model:
        """The loaded model, for benchmarks and research."""
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model

    def _kernels(self) -> Kernels:
        threads = self._config.threads or os.cpu_count() or 1
        dtype = _DTYPES[self._config.dtype]
        try:
            device = torch.device(self._config.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {self._config.device!r} can't be used: {error}") from None
        if self._config.dtype == "int8" and device.type != "cpu":
            raise ModelError(f"dtype int8 runs on the device cpu only, not on {self._config.device!r}")
        if device.type == "cpu" and dtype == torch.float32:
            torch.set_num_threads(1)  # the kernels' own threads do what is large
            return CpuInt8Kernels(threads) if self._config.dtype == "int8" else CpuKernels(threads)
        torch.set_num_threads(threads)
        if device.type == "cuda":
            # Only here: torch brings Triton along where it is built for CUDA.
            from executor_service.backends.torch_backend.cuda_kernels import CudaKernels

            if device.index is not None:
                torch.cuda.set_device(device)  # of this thread: Triton launches on the current one
            return CudaKernels(device, dtype)
        return PlainKernels(device, dtype)

    def _describe(self, checkpoint: Checkpoint, digest: bytes) -> ModelInfo:
        spec = checkpoint.spec
        item_bytes = _DTYPES[self._config.dtype].itemsize
        return ModelInfo(
            name=checkpoint.name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            parameters=sum(int(np.prod(shape)) for _, shape in expected_shapes(spec)),
            dtype=self._config.dtype,
            device=self._config.device,
            hidden_size=spec.hidden_size,
            layers=spec.layers,
            kv_bytes_per_token=2 * spec.layers * self.model.spec.kv_heads * spec.head_dim * item_bytes,
            eos_token_ids=spec.eos_token_ids,
            fingerprint=digest,
            can_forward=True,
            has_tokenizer=self._has_tokenizer(checkpoint),
        )

    def _has_tokenizer(self, checkpoint: Checkpoint) -> bool:
        if isinstance(checkpoint, GgufCheckpoint):
            return "tokenizer.ggml.model" in checkpoint.file.metadata
        return (self._config.model / "tokenizer.json").is_file()

    def _forward_alone(self, tokens: TokenIds, want: frozenset[str]) -> ForwardOutput:
        model, spec = self.model, self.model.spec
        pages = -(-len(tokens) // _WARMUP_PAGE) + 1
        # One layer's storage serves all: no layer reads what another wrote.
        scratch = model.kernels.new_cache(pages, _WARMUP_PAGE, spec.kv_heads, spec.head_dim)
        row = _prompt_row(tokens, pages, Sampling())
        batch = lay_out([row], _WARMUP_PAGE, model.kernels.device)
        hidden = model.hidden(batch, [scratch] * spec.layers)
        mean = hidden.float().mean(0)
        return ForwardOutput(
            hidden=hidden.float().cpu().numpy() if "hidden" in want else None,
            embedding=(mean / mean.norm().clamp_min(1e-12)).cpu().numpy() if "embedding" in want else None,
            logits=self._shard.whole_logits(model.logits(hidden)).cpu().numpy() if "logits" in want else None,
        )

    def _warm_up(self) -> None:
        """Compile what the first step needs: numba caches it on disk, so only the first start is slow."""
        kernels = self.model.kernels
        with torch.inference_mode(), kernels.step():
            tokens = np.zeros(8, np.int32)
            logits = self._forward_alone(tokens, frozenset({"logits"})).logits
            if kernels.device.type == "cuda":  # more tokens than a verification has are another kernel
                self._forward_alone(np.zeros(min(16, self.info.context_length), np.int32), frozenset())
            for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)):
                sampler.sample(torch.from_numpy(logits), [_prompt_row(tokens, 2, sampling)], kernels)


def _parts(rows: Sequence[ForwardRow]) -> Iterator[list[ForwardRow]]:
    """The rows in runs of some _LOGITS_ROWS outputs: logits are the largest thing in a step."""
    part: list[ForwardRow] = []
    outputs = 0
    for row in rows:
        part.append(row)
        outputs += row.outputs
        if outputs >= _LOGITS_ROWS:
            yield part
            part, outputs = [], 0
    if part:
        yield part


def _prompt_row(tokens: TokenIds, pages: int, sampling: Sampling) -> ForwardRow:
    return ForwardRow(
        start=0,
        tokens=tokens,
        history=tokens,
        prompt_length=len(tokens),
        block_table=np.arange(1, pages, dtype=np.int32),
        outputs=len(tokens),
        output=OutputMode.SAMPLE,
        sampling=sampling,
    )


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
