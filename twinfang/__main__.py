"""``python -m twinfang``."""

import sys

from twinfang.cli import main

if __name__ == "__main__":
    sys.exit(main())
