"""Why sequences wait: the reasons, and the time that each took."""
