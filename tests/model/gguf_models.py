"""A Hugging Face directory as a GGUF file, as llama.cpp converts it; names are the format's own library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

_ARCHITECTURES = {
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "qwen2_5_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": gguf.MODEL_ARCH.QWEN3VL,
}
_PERMUTED = ("mistral", "mixtral", "granite", "smollm3")  # by llama.cpp's converter of Llama models


def convert(
    directory: Path,
    file: Path,
    matrices: gguf.GGMLQuantizationType | None = None,
    vocabulary: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write the model in `directory` to `file`; the file.

    `matrices`: the type of linear layers but routers; `vocabulary`: of embedding and output layer. All else
    is in fp32.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config)
    _write_rope(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _converted(_tensors(directory), config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = vocabulary if stored.startswith(("token_embd", "output.")) else matrices
        values = tensor.float().numpy()
        if kind is None or values.ndim < 2 or "_inp" in stored:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _head_dim(config: dict[str, Any]) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if kind == "mixtral":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind in ("gemma3_text", "gemma2"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "exaone4" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])
    if kind == "qwen3_vl_text":
        writer.add_num_deepstack_layers(3)
    if kind == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])


def _write_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] == "phi3":
        writer.add_rope_dimension_count(int(_head_dim(config) * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    elif config["model_type"] == "glm4":
        writer.add_rope_dimension_count(int(_head_dim(config) * rope["partial_rotary_factor"]))
    elif config["model_type"] in _PERMUTED:
        writer.add_rope_dimension_count(_head_dim(config))


def _converted(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rows of Llama's q and k in pairs, experts in stacks, Gemma's norms with the 1 that it adds to them."""
    kind = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        *_, layer, _ = name.split(".")
        if kind in _PERMUTED and layer in heads:
            halves = tensor.reshape(heads[layer], 2, -1, *tensor.shape[1:])
            found[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
        elif kind in ("gemma3_text", "gemma2") and name.endswith("norm.weight"):
            found[name] = tensor + 1
        elif ".experts." not in name:
            found[name] = tensor
    for i in range(config["num_hidden_layers"] if kind == "mixtral" else 0):
        for part in ("w1", "w2", "w3"):
            stack = [
                tensors[f"model.layers.{i}.block_sparse_moe.experts.{j}.{part}.weight"]
                for j in range(config["num_local_experts"])
            ]
            found[f"layers.{i}.feed_forward.experts.{part}.weight"] = torch.stack(stack)
    return found
