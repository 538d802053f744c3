"""Text at the edge: prompts to token ids, token ids to text, and where text ends."""
