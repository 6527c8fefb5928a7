"""`python -m slime_tis` is the command `slime-tis`."""

import sys

from slime_tis.main import main

if __name__ == "__main__":
    sys.exit(main())
