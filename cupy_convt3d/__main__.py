"""`python -m cupy_convt3d` is the command `convt3d`."""

import sys

if __name__ == "__main__":
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.append(sys.path.pop(0))  # the current folder: not before the standard library
    from .cli import program

    sys.exit(program())
