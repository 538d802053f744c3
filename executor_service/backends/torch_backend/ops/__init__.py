"""The operations that a model is made of, in plain torch, and the types that all devices share."""
