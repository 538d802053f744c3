"""The model of all families, its runs on the host, and what its prompts answer."""
