"""Paceline's scheduler: continuous batching over executors, and the public API."""
