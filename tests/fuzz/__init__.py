"""Hostile clients: random and chosen messages against live services."""
