"""The executor contract as a test suite: any address, any backend, gRPC alone. See README.md."""
