"""`python -m fastformer`, and so `torchrun -m fastformer`: the command line."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

from fastformer.cli import main


def leave(code: int) -> NoReturn:
    """Ends the process.

    After a signal or a failure, a process that a launcher started with others ends at once. Python would take its
    modules apart first, for half a second of a core and for many seconds on a busy machine, while the launcher counts
    those until it kills; and process groups whose other ends are gone may wait for them. What a command keeps is on the
    disk when it returns.
    """
    if code and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader went away
                stream.flush()
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
