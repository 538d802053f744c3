"""Deliberately wrong executors: what the checks must catch. `python -m tests.conformance.mutants --table`."""
