"""A Hugging Face directory as a GGUF file, as llama.cpp converts it; names are the format's own library's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.model.gguf_metadata import PERMUTED, write_metadata

_ARCHITECTURES = {
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE,  # if all layers have attention
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "qwen2_5_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": gguf.MODEL_ARCH.QWEN3VL,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
}
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
_MXFP4 = gguf.GGMLQuantizationType.MXFP4
Tensors = dict[str, torch.Tensor]


def convert(
    directory: Path,
    file: Path,
    matrices: gguf.GGMLQuantizationType | None = None,
    vocabulary: gguf.GGMLQuantizationType | None = None,
    *,
    fused: bool = False,
    drafts: int = 0,
) -> Path:
    """Write the model in `directory` to `file`; the file.

    `matrices`: the type of linear layers but routers; `vocabulary`: of embedding and output layer. All else
    is in fp32, but for MXFP4, which stays. fused: q, k and v are in one. drafts: blocks that draft tokens,
    which are copies of the last one, follow it.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    write_metadata(writer, config, drafts)
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(architecture, layers + drafts)
    tensors = _converted(_tensors(directory), config)
    if fused:
        tensors = dict(_fused(tensors))
    if drafts:
        tensors |= _drafting(tensors, layers, drafts)
    for name, tensor in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = vocabulary if stored.startswith(("token_embd", "output.")) else matrices
        values = tensor.numpy() if tensor.dtype == torch.uint8 else tensor.float().numpy()
        if values.dtype == np.uint8:
            writer.add_tensor(stored, values, raw_dtype=_MXFP4)
        elif kind is None or values.ndim < 2 or "_inp" in stored or stored.endswith("bias"):
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(directory: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _converted(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rows of Llama's q and k in pairs, experts in stacks, Gemma's norms with the 1 that it adds to them."""
    kind = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[-2]
        if kind in PERMUTED and layer in heads:
            halves = tensor.reshape(heads[layer], 2, -1, *tensor.shape[1:])
            found[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
        elif kind in ("gemma3_text", "gemma2") and name.endswith("norm.weight"):
            found[name] = tensor + 1
        elif match := _EXPERT.fullmatch(name):
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        elif kind == "granitemoehybrid" and "shared_mlp" in name:
            found |= _of_granite(name, tensor)
        elif kind == "gpt_oss":
            found |= _of_gpt_oss(name, tensor, tensors)
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = tensor[0]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found | {name: torch.stack([one for _, one in sorted(of.items())]) for name, of in stacks.items()}


def _of_granite(name: str, tensor: torch.Tensor) -> Tensors:
    if "output_linear" in name:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): tensor}
    gate, up = tensor.chunk(2)
    return {
        name.replace("shared_mlp.input_linear", "mlp.gate_proj"): gate,
        name.replace("shared_mlp.input_linear", "mlp.up_proj"): up,
    }


def _of_gpt_oss(name: str, tensor: torch.Tensor, tensors: Tensors) -> Tensors:
    """Gates apart from ups, [out, in]; blocks of MXFP4 with the scale first."""
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if name.endswith("_scales") or ".experts." not in name:
        return {} if name.endswith("_scales") else {name: tensor}
    if name.endswith("_blocks"):
        tensor = _mxfp4(tensor, tensors[name.replace("_blocks", "_scales")])
    elif not name.endswith("_bias"):
        tensor = tensor.swapaxes(1, 2)
    stem = name.removesuffix("_blocks").removesuffix("_bias")
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    if stem.endswith("down_proj"):
        return {stem + suffix: tensor}
    gate, up = (stem.replace("gate_up_proj", f"{part}_proj{suffix}") for part in ("gate", "up"))
    return {gate: tensor[:, 0::2], up: tensor[:, 1::2]}


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., groups, 16] with numbers 2i and 2i + 1 in byte i, as rows that have i and i + 16 there."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    low, high = numbers.chunk(2, -1)
    return torch.cat([scales[..., None], low | (high << 4)], -1).flatten(-2)


def _drafting(tensors: Tensors, layers: int, drafts: int) -> Tensors:
    """Blocks after the last one, like it, and what joins a token's embedding to the vector before it."""
    last, size = f"model.layers.{layers - 1}.", len(tensors["model.norm.weight"])
    found: Tensors = {}
    for prefix in (f"model.layers.{i}." for i in range(layers, layers + drafts)):
        found |= {prefix + name.removeprefix(last): one for name, one in tensors.items() if last in name}
        found |= {f"{prefix}{norm}.weight": torch.ones(size) for norm in ("enorm", "hnorm")}
        found[f"{prefix}eh_proj.weight"] = torch.ones(size, 2 * size)
    return found


def _fused(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            yield name, tensor
