"""Prometheus metrics and rates."""
