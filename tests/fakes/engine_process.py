"""An engine of another machine, as far as a trainer can tell: a process that connects to a run, with the profile tests' policy.

``python -m fakes.engine_process RUN MOMENT``: dies by SIGKILL before its Nth generate where MOMENT is `call:N`, never where it is `none`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fakes.profile_run import arm, sometimes_right

from pivotrl.rollouts.launchers import ADDRESS, KEY, split_address
from pivotrl.rollouts.replica import serve
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.wire import knock

if __name__ == "__main__":
    directory = Path(sys.argv[1]) / "engines"
    engine = ScriptedEngine.from_function(sometimes_right)
    arm(sys.argv[2], engine)
    address = split_address((directory / ADDRESS).read_text().strip(), key="address")
    serve(knock(address, (directory / KEY).read_bytes(), name=sys.argv[2]), lambda start: engine)
