"""Backends without a model: tokens that follow from a seed, or that a script says."""
