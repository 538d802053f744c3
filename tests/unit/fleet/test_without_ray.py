"""What of fleets does not need Ray."""

from __future__ import annotations

import subprocess
import sys


def test_specs_plans_and_the_roster_are_read_without_ray() -> None:
    program = (
        "import sys; sys.modules['ray'] = None; import paceline_fleet.plan, paceline_fleet.roster,"
        " paceline_fleet.tokens, paceline_fleet.runner, paceline_fleet.announcer, paceline.cli.fleet"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
