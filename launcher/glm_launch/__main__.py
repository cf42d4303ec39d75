"""`python -m glm_launch`, what start.sh runs."""

from __future__ import annotations

from glm_launch.cli import main

if __name__ == "__main__":
    main()
