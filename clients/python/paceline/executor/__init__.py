"""The executor service: generated stubs in `v1`."""
