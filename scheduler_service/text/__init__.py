"""Prompts to token ids, token ids to text, and stop strings. The scheduler's core has token ids only."""
