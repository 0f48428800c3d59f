"""`python -m benchmarks.full_stack`."""

import sys

from benchmarks.full_stack import main

if __name__ == "__main__":
    sys.exit(main())
