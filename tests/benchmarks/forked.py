"""A benchmark as it runs, but that its workers are forks: SCRIPT and its arguments.

Each would import torch for seconds. Itself it is one: `tests.programs.forked`.
"""

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.forking import Program, become


class Worker:
    """What the benchmark asks of a `subprocess.Popen`."""

    def __init__(self, task: dict[str, Any]):
        from compared import measuring

        log = str(Path(task["folder"]) / f"log{task['rank']}")
        args = [str(measuring.BENCHMARKS / "worker.py"), json.dumps(task)]
        program = Program(args, measuring.environment(), log, log)
        self.code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            works_and_ends(program)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


def works_and_ends(program: Program) -> None:
    code = 1
    try:
        become(program)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # nothing of the benchmark's own goes on here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    from compared import (
        measuring,
        peers_pipelined,  # noqa: F401  what workers import, once for all
    )

    measuring._start = Worker
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
