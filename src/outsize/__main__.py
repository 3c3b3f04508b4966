"""`python -m outsize`: the same program as the console script `outsize`."""

import sys

from outsize.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
