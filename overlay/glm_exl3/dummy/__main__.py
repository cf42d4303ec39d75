"""Entry point of `python -m glm_exl3.dummy`."""

import sys

from glm_exl3.dummy.cli import main

sys.exit(main())
