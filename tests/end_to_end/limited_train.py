"""train.py with less memory: the rank that FIRST names gets EXTRA more bytes than it has by then.

Arguments: FIRST, EXTRA, then train.py's own.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

# The limit counts what threads reserve for their stacks and never touch, 8 MB each, of which a run
# starts several behind the rehearsal. glibc reads its default when a process starts.
SMALL, USUAL = 2**20, 2**23
if resource.getrlimit(resource.RLIMIT_STACK)[0] != SMALL:
    resource.setrlimit(resource.RLIMIT_STACK, (SMALL, resource.RLIM_INFINITY))
    os.execv(sys.executable, [sys.executable, *sys.argv])
resource.setrlimit(resource.RLIMIT_STACK, (USUAL, resource.RLIM_INFINITY))

import train  # noqa: E402
from training.engine import leave  # noqa: E402

limited, extra, *arguments = sys.argv[1:]
if os.environ.get("RANK", "0") == limited:
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (held * 1024 + int(extra),) * 2)
leave(train.main(arguments))
