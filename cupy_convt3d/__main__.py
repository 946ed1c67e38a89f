"""`python -m cupy_convt3d` is the command `convt3d`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
