"""Backends: what computes a step's rows. `base.py` is the border; one module or package each."""
