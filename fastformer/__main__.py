"""`python -m fastformer`, and so `torchrun -m fastformer`: the command line."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

from fastformer.cli import main


def leave(code: int) -> NoReturn:
    """Ends the process.

    After a signal or a failure, a process that a launcher started with others ends at once. Python's own shutdown would
    take half a second of a core, and many seconds on a busy machine, while the launcher waits only for a limited time
    before it kills the process; and process groups may wait for peers that have ended. Nothing is lost: a command's
    results are on the disk when it returns.
    """
    if code and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of the stream has closed it
                stream.flush()
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
