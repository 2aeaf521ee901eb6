"""`python -m linrope`: the command line, for an environment whose `linrope` is not on the path."""

import sys

from linrope.cli.main import main

if __name__ == "__main__":  # data loaders that start processes import this module
    sys.exit(main())
