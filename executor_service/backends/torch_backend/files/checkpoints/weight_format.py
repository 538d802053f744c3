"""`WeightFormat`: what a format of quantized weights knows of its tensors; and what formats share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from service_kit.logs import Log

from executor_service.backends.torch_backend.files.checkpoints.module import QuantizedModule
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.files.fields import Fields, shown

WHOLE_ROW = -1
"""The group size that stands for one group in each row."""


class WeightFormat(Protocol):
    """One format with one configuration. What raises, raises ModelError naming tensor or field."""

    title: str  # for users: "GPTQ with 4 bits"
    main: str  # suffix of the tensor that every quantized module has
    beside: frozenset[str]  # suffixes of what else belongs to a quantized module
    unused: frozenset[str]  # suffixes of tensors that mean nothing here, of whatever module
    plain_modules: frozenset[str]  # modules that the configuration lists as not quantized

    def shape(self, module: QuantizedModule) -> tuple[int, int]:
        """The shape [n, k] of the weight, from the headers of the module's tensors, all of them checked."""

    def check(self, module: QuantizedModule) -> None:
        """Check the values of scales and indices; `shape` was called before."""

    def read(self, module: QuantizedModule) -> ScaledNumbers:
        """The weight; `shape` was called before."""


def group_count(module: QuantizedModule, suffix: str, k: int, size: int) -> int:
    """Groups of `size` columns in rows of k. Raises ModelError naming the tensor if they do not divide k."""
    if size == WHOLE_ROW:
        return 1
    if k % size:
        raise module.fault(suffix, f"has rows of {k} numbers, which groups of {size} do not divide")
    return k // size


def columns_in_groups(k: int, size: int) -> torch.Tensor:
    """The group of each of k columns: int64 [k]; the last group may be smaller."""
    return torch.arange(k) // (k if size == WHOLE_ROW else size)


def group_size(f: Fields, default: int | None = None) -> int:
    """The field `group_size`: a positive number, or -1 for one group in each row. Raises ModelError."""
    return WHOLE_ROW if f.get("group_size", default) == WHOLE_ROW else f.size("group_size", default)


def of_groups(size: int) -> str:
    """The group size in words."""
    return "with a scale for each row" if size == WHOLE_ROW else f"in groups of {size}"


def packed_bits(f: Fields, supported: Sequence[int]) -> int:
    """The field `bits`. Raises ModelError if it is missing or not supported."""
    bits = f.size("bits")
    if bits not in supported:
        raise f.fault(f"bits {bits} is not supported, only {' and '.join(map(str, supported))}")
    return bits


def module_names(f: Fields, keys: Sequence[str]) -> frozenset[str]:
    """The modules that some fields list, in one set; patterns are not evaluated. Raises ModelError."""
    names: set[str] = set()
    for key in keys:
        given = f.get(key, [])
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise f.fault(f"{key} is {shown(given)}, expected a list of modules")
        names.update(given)
    return frozenset(names)


WORD_BITS = 32  # of a word, into which numbers of `PACKED_BITS` are packed
PACKED_BITS = (4, 8)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., words] to uint8 [..., words * 32 / bits], the lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def difference_dtype(bits: int) -> torch.dtype:
    """The narrowest dtype for the difference of a number and a zero point, both unsigned."""
    return torch.int8 if bits < 8 else torch.int16


METADATA = frozenset(
    {
        # which programs, in which versions
        "autoround_version", "backend", "iters", "meta", "model_file_base_name", "model_name_or_path",
        "producer", "provider", "quantizer", "version", "quant_method",
        # what the weights were calibrated with
        "batch_size", "cache_block_outputs", "dataset", "max_input_length", "model_seqlen", "nsamples",
        "pad_token_id", "seqlen", "tokenizer", "train_bs",
        # how they were rounded
        "act_group_aware", "amp", "damp_auto_increment", "damp_percent", "enable_minmax_tuning",
        "enable_norm_bias_tuning", "enable_quanted_input", "global_compression_ratio",
        "gradient_accumulate_steps", "low_gpu_mem_usage", "lr", "minmax_lr", "mse", "observer",
        "observer_kwargs", "offload_to_disk", "parallel_packing", "static_groups", "sym", "true_sequential",
        # which modules: the tensors tell
        "block_name_to_quantize", "lm_head", "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "targets",
        # in which dtype something was computed; tensors have dtypes of their own
        "model_dtype", "scale_dtype", "zp_dtype",
        # how others compute; activations are not quantized here
        "dequantize", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len",
        "input_activations", "modules_to_fuse", "output_activations", "run_compressed", "use_cuda_fp16",
        "use_exllama",
    }
)  # fmt: skip
"""Fields of a quantization_config about how weights were quantized, not about what the tensors mean: those of
transformers' classes, AutoGPTQ, GPTQModel, AutoAWQ, AutoRound and compressed-tensors."""

_SUFFIXES = frozenset(
    {
        "k_scale",
        "v_scale",
        "kv_scale",
        "q_scale",
        "k_zero_point",
        "v_zero_point",
        "q_zero_point",
        "output_scale",
    }
)
"""Of the tensors, in a layer's attention or in its projections."""

log = Log(__name__)


def unused_scales(config: Fields) -> frozenset[str]:
    """The suffixes of tensors that `kv_cache_scheme` has in the files; none without that field."""
    if not config.get("kv_cache_scheme", None):
        return frozenset()
    log.warning(
        "kv_cache_scheme: its scales of keys and values are not used; 8-bit pages have scales of their own"
    )
    return _SUFFIXES
