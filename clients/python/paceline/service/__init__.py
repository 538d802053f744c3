"""Shared by both service processes: settings, logs, authentication, signals. Not imported by clients."""
