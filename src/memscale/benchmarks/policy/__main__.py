"""`python -m memscale.benchmarks.policy`."""

import sys

from memscale.benchmarks.policy import main

if __name__ == "__main__":
    sys.exit(main())
