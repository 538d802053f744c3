"""The gRPC surface: requests decoded and checked, answers encoded, health and metrics told."""
