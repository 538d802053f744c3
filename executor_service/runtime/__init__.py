"""The loaded model, its device thread, and the state of the service."""
