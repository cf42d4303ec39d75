"""Entry point of `python -m glm_exl3.recode`."""

import sys

from glm_exl3.recode.cli import main

sys.exit(main())
