"""The gRPC service: decodes and checks requests, encodes results, reports health and metrics."""
