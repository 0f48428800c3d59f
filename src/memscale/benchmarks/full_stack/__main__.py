"""`python -m memscale.benchmarks.full_stack`."""

import sys

from memscale.benchmarks.full_stack import main

if __name__ == "__main__":
    sys.exit(main())
