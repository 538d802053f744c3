"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
# The default run is the same for everybody; --hypothesis-profile explore looks further.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False)
settings.load_profile("paceline")
