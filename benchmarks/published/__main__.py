"""`python -m benchmarks.published`."""

import sys

from benchmarks.published import main

if __name__ == "__main__":
    sys.exit(main())
