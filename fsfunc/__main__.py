"""``python -m fsfunc``: what the library answers from the command line."""

import os
import sys

from fsfunc.cli import main
from fsfunc.comm.tracebacks import api_boundary


@api_boundary
def run() -> int:
    """Runs the command line of this process, and returns its exit status."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    return status


if __name__ == "__main__":
    sys.exit(run())
