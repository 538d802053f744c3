"""What both services are built with: settings, logs, credentials, signals. Clients do not need it."""
