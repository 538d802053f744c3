"""Tensor parallelism: several processes compute one model, each with a part of every layer."""
