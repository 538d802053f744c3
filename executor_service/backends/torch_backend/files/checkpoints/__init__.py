"""Quantized weights in safetensors directories: each format is a file that knows its tensors and fields."""
