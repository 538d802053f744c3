"""Executors as the loop sees them: `executor` is one of them, `pool` chooses the one to use."""
