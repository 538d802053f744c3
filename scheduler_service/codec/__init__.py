"""Where protobuf ends: `steps` to and from executors, `requests` and `responses` for clients."""
