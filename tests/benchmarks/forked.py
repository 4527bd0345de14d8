"""A benchmark as it runs, but that its workers are forks: SCRIPT and its arguments.

Each would import torch for seconds. Itself it is one: `tests.programs.forked`.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    from compared import forks

    forks.prepare()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
