"""``python -m fxmem``."""

import sys

from fxmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
