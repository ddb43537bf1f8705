"""train.py on a rank whose disk is bad, in a way of its own.

Arguments: RANK, WAY, then train.py's own. WAY is "unreadable": the data's file cannot be read from
some step on; "full": no file may grow beyond 50,000 bytes; "slow": on all ranks, from the second
checkpoint on each piece of a checkpoint's file takes a minute.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from typing import Any

import train
from training import session, writer
from training.engine import leave


class Unreadable(session.Loader):
    def __next__(self) -> Any:
        if self.samples_consumed >= 8 * 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "train.bin")
        return super().__next__()


def slowly(self: Any, data: Any) -> int:
    if (self._path.parent.parent / "latest").exists():
        time.sleep(60)
    return write(self, data)


bad, way, *arguments = sys.argv[1:]
write = writer.HashedFile.write
if way == "slow":
    writer.HashedFile.write = slowly  # type: ignore[method-assign]
elif os.environ["RANK"] == bad:
    if way == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    else:
        session.Loader = Unreadable  # type: ignore[misc]
leave(train.main(arguments))
