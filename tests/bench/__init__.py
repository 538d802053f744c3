"""Benchmarks: scripts, never tests. Each prints one JSON object a line."""
