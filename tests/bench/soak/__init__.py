"""Mixed load on one `paceline serve` while faults strike: `python -m tests.bench.soak`."""
