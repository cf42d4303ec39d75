"""`python -m glm_exl3.drafter`."""

import sys

from glm_exl3.drafter.cli import main

if __name__ == "__main__":
    sys.exit(main())
