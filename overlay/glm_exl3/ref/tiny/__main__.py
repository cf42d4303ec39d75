"""Entry point of `python -m glm_exl3.ref.tiny`."""

import sys

from glm_exl3.ref.tiny.cli import main

sys.exit(main())
