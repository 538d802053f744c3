"""The scheduler service: generated stubs in `v1`."""
