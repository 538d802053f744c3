"""What every service process of ours has: settings, logs, a guarded port, signals. Not for clients."""
