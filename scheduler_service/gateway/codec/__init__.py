"""Messages of the worker protocol, from and to plain data."""
