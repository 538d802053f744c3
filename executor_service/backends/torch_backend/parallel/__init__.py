"""Tensor parallelism: several processes, each with a part of every layer, compute as one."""
