"""Connections to executors: `executor` is one of them, `pool` chooses the active one."""
