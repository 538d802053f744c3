"""Quantized checkpoints: written and dequantized here by the plainest loops, then read by the loader."""
