"""What both services need to be a process: settings, logs, security, signals. Not for clients."""
