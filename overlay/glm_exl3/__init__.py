"""GLM-5.3-Flash from EXL3 weights: the vLLM plugin.

Importing this package imports neither torch nor vLLM; `plugin.register` does the work.
"""

from __future__ import annotations

__version__ = "0.1.0"
