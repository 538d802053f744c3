"""Rotary position embedding: what a model's files say of it, and the tables of cosines and sines."""
