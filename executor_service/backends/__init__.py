"""Backends compute a step's rows. `base.py` declares their interface; each is a module or a package."""
