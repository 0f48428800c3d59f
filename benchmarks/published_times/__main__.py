"""`python -m benchmarks.published_times`."""

import sys

from benchmarks.published_times import main

if __name__ == "__main__":
    sys.exit(main())
