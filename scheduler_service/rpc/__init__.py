"""The gRPC server's side: handlers, errors as statuses, health."""
