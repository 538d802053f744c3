"""A draft model made of a model's own first layers, as a Hugging Face directory.

usage: python -m tests.support.first_layers OUT [--model FILE] [--layers 8]

Embeddings, final norm and output layer stay, so its logits are an early guess at the model's own. No
layer was trained to be the last one: it drafts badly, and shows that drafting is correct, not fast.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import save_file

from executor_service.backends.torch_backend.files.architecture.rope.spec import RopeSpec
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.tokenizer_files import (
    tokenizer_from_directory,
    tokenizer_from_gguf,
)
from executor_service.backends.torch_backend.files.weights import Checkpoint, open_checkpoint
from tests.model.default_model import default_model

_LAYER = "model.layers."


def write_first_layers(model: Path, out: Path, layers: int) -> None:
    """Write the first `layers` layers of `model` to the directory `out`. Raises ModelError, ValueError."""
    checkpoint = open_checkpoint(model)
    try:
        spec = checkpoint.spec
        if not 1 <= layers < spec.layers:
            raise ValueError(f"layers: expected 1 to {spec.layers - 1}, got {layers}")
        if spec.moe or spec.rope != RopeSpec(spec.rope.theta):
            raise ValueError(f"{checkpoint.name}: experts and scaled rotary frequencies are not written")
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(_config(spec, layers), indent=2))
        save_file(
            {name: checkpoint.read(name).contiguous() for name in _names(checkpoint, layers)},
            out / "model.safetensors",
        )
        tokenizer = (
            tokenizer_from_gguf(checkpoint.file)
            if isinstance(checkpoint, GgufCheckpoint)
            else tokenizer_from_directory(model)
        )
    finally:
        checkpoint.close()
    (out / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    texts = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(texts, indent=2))


def _names(checkpoint: Checkpoint, layers: int) -> list[str]:
    """The tensors of all that is not in a later layer."""
    return [
        name
        for name, _ in expected_shapes(checkpoint.spec)
        if not name.startswith(_LAYER) or int(name.removeprefix(_LAYER).split(".")[0]) < layers
    ]


def _config(spec: ModelSpec, layers: int) -> dict[str, object]:
    return {
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "attention_bias": spec.output_bias,
        "tie_word_embeddings": spec.tied_embeddings,
        "eos_token_id": list(spec.eos_token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=None, help="default: the default model")
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    write_first_layers(args.model or default_model(), args.out, args.layers)
    print(f"{args.out}: {args.layers} layers")


if __name__ == "__main__":
    main()
