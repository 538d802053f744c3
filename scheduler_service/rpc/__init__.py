"""The door for gRPC clients: handlers, errors as statuses, health."""
