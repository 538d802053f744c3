"""Paceline's executor: owns the model, the device and the paged KV cache; computes steps."""
