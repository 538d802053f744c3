"""The OpenAI API as its official SDKs see it, through the smg gateway."""
