"""Untrusted files of models and adapters: JSON, typed fields, the headers of safetensors files."""
