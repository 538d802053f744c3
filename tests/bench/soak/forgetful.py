"""`python -m tests.bench.soak.forgetful`: a scheduler that keeps its step log for 30 s, not an hour.

Within an hour the log grows to 64 MiB at most; what else grows is seen without it.
"""

from __future__ import annotations

import sys

from scheduler_service.__main__ import main
from scheduler_service.core import step_log

KEPT_S = 30.0

if __name__ == "__main__":
    step_log.MEMORY_S = KEPT_S
    sys.exit(main())
