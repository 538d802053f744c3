"""Generated stubs: `make protos`."""
