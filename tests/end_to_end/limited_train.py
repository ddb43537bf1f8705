"""train.py with less memory: the rank that FIRST names gets EXTRA more bytes than it has by then.

Arguments: FIRST, EXTRA, then train.py's own.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

import train
from training.engine import leave

# Else every thread that starts behind the rehearsal takes 8 MB of the limit.
threading.stack_size(2**19)
limited, extra, *arguments = sys.argv[1:]
if os.environ.get("RANK", "0") == limited:
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (held * 1024 + int(extra),) * 2)
leave(train.main(arguments))
