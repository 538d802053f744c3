"""The loops that drive executors: plan, send, receive, apply."""
