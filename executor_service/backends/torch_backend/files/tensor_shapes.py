"""Names and shapes of the tensors of a model, and the check of what files have of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec, QkNorm
from executor_service.backends.torch_backend.files.shape_fields import by_fields
from executor_service.backends.torch_backend.files.stored_names import (
    CLASSIFIER,
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SHARED_EXPERT,
    SHARED_GATE,
    SINKS,
)

Shapes = dict[str, tuple[int, ...]]

Part = tuple[slice, ...]
"""A part of a tensor: a slice of each of its first dimensions, step 1."""

_HEAD_BIASES, _LAYERS = ("lm_head.bias", "score.bias"), "model.layers."
_GGUF_CLASSIFIERS = ("cls.output.weight", "cls.weight")
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")  # old files have them beside the weights; ignored


def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model of this spec."""
    hidden = spec.hidden_size
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield EMBEDDING, (spec.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, hidden)
    if spec.labels:
        yield CLASSIFIER, (spec.labels, hidden)
    for i in range(spec.layers):
        layer = f"model.layers.{i}."
        yield from ((f"{layer}{norm}.weight", (hidden,)) for norm in spec.norms if norm)
        for part, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{layer}self_attn.{part}.weight", (rows, hidden)
            if spec.qkv_bias:
                yield f"{layer}self_attn.{part}.bias", (rows,)
        yield layer + "self_attn.o_proj.weight", (hidden, q)
        if spec.output_bias:
            yield layer + "self_attn.o_proj.bias", (hidden,)
        if spec.sinks:
            yield layer + SINKS, (spec.heads,)
        if spec.qk_norm is not QkNorm.NONE:
            together = spec.qk_norm is QkNorm.ALL
            yield layer + "self_attn.q_norm.weight", (q if together else spec.head_dim,)
            yield layer + "self_attn.k_norm.weight", (kv if together else spec.head_dim,)
        if spec.moe and i in spec.moe.sparse_layers:
            yield layer + "mlp.gate.weight", (spec.moe.experts, hidden)
            for j in range(spec.moe.experts):
                expert = f"{layer}mlp.experts.{j}."
                yield from _mlp_shapes(expert, hidden, spec.moe.intermediate_size, bias=spec.moe.clamped)
            if spec.moe.clamped:
                yield layer + "mlp.gate.bias", (spec.moe.experts,)
            if spec.moe.corrected:
                yield layer + CORRECTION, (spec.moe.experts,)
            if spec.moe.shared_size:
                yield from _mlp_shapes(layer + SHARED_EXPERT, hidden, spec.moe.shared_size, bias=False)
            if spec.moe.shared_gate:
                yield layer + SHARED_GATE, (1, hidden)
        else:
            yield from _mlp_shapes(layer + "mlp.", hidden, spec.intermediate_size, bias=spec.mlp_bias)


def _mlp_shapes(prefix: str, hidden: int, inner: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield f"{prefix}{part}_proj.weight", (rows, columns)
        if bias:
            yield f"{prefix}{part}_proj.bias", (rows,)


def check_no_classifier(found: Collection[str], where: str) -> None:
    """Raises ModelError where a tensor of a GGUF file is the head of a model for classification."""
    for name in _GGUF_CLASSIFIERS:
        if name in found:
            raise ModelError(
                f"{where}: tensor {name!r} is a classification head, which is not supported in GGUF files; to"
                " rerank, serve the directory that it was made of, or a model with its output layer"
            )


def check_shapes(spec: ModelSpec, found: Shapes, where: str) -> None:
    """Raises ModelError for the first tensor of the spec that is missing or has another shape."""
    for name, shape in expected_shapes(spec):
        check_shape(name, shape, found, where)


def check_shape(name: str, shape: tuple[int, ...], found: Shapes, where: str) -> None:
    """Raises ModelError where the tensor is missing or has another shape."""
    if name not in found:
        raise ModelError(f"{where}: the tensor {name!r} is missing{by_fields(name)}")
    if found[name] != shape:
        raise ModelError(
            f"{where}: tensor {name!r} has the shape {found[name]}, expected {shape}{by_fields(name)}"
        )


def unused(spec: ModelSpec, found: Shapes) -> Iterator[str]:
    """The tensors of the head or a layer that the spec does not have.

    Layers beyond the spec's and the buffers of old files are left out.
    """
    used = {name for name, _ in expected_shapes(spec)} | {HEAD}
    for name in found:
        layer = name.removeprefix(_LAYERS).split(".", 1)[0] if name.startswith(_LAYERS) else ""
        inside = layer.isdecimal() and int(layer) < spec.layers and not name.endswith(_BUFFERS)
        if (inside or name in _HEAD_BIASES) and name not in used:
            yield name
