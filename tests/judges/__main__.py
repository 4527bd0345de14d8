"""torch's databases, a sample of each: ``python -m tests.judges --sample 4 0``."""

import sys

from tests.judges import modules, operators, optimizers

DATABASES = operators, modules, optimizers

if __name__ == "__main__":
    sys.exit(sum(database.main(sys.argv[1:]) for database in DATABASES) > 0)
