"""A Qwen3 model of random weights as a Hugging Face directory, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.adapter_files import factors

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 320


def write_tiny_model(directory: Path, context_length: int) -> Path:
    """Write config, weights and a byte tokenizer; the directory."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def tiny_adapter(seed: int) -> dict[str, Any]:
    """Arguments of `write_adapter` for an adapter of all linear layers."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    linears = {
        "self_attn.q_proj": (HIDDEN, q), "self_attn.k_proj": (HIDDEN, kv), "self_attn.v_proj": (HIDDEN, kv),
        "self_attn.o_proj": (q, HIDDEN), "mlp.gate_proj": (HIDDEN, FFN), "mlp.up_proj": (HIDDEN, FFN),
        "mlp.down_proj": (FFN, HIDDEN),
    }  # fmt: skip
    shapes = {(layer, path): shape for layer in range(LAYERS) for path, shape in linears.items()}
    modules = [path.partition(".")[2] for path in linears]
    return {"tensors": factors(shapes, seed=seed, gain=0.2), "target_modules": modules}


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        # Wide enough that logits differ clearly: the checks compare tokens.
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 8.0),
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2.0),
            prefix + "self_attn.q_norm.weight": norm(HEAD_DIM),
            prefix + "self_attn.k_norm.weight": norm(HEAD_DIM),
            prefix + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, FFN, 2.0),
        }
    return weights


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])  # 256 and 257, as the config says
    return tokenizer
