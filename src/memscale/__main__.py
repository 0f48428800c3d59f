"""`python -m memscale` is `memscale`."""

import sys

from memscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
