"""``python -m gradsync``."""

import sys

from gradsync.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
