"""For all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A background job of a shell ignores these, and the services that tests start and signal would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says how busy the machine is, not whether the code is right.
# The default run is the same for everybody; --hypothesis-profile explore looks further.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False)
settings.load_profile("paceline")
