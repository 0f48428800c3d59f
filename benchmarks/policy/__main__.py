"""`python -m benchmarks.policy`."""

import sys

from benchmarks.policy import main

if __name__ == "__main__":
    sys.exit(main())
