"""The OpenAI API of `paceline serve --openai` and `paceline gateway`, as its official SDKs see it."""
