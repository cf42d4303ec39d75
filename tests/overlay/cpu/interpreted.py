"""Compare our functions with vLLM's interpreted kernels.

    python interpreted.py RESULT.json

The result says per case whether all outputs agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import interpreted_drafts
import interpreted_inputs
import interpreted_sampling
from interpreted_base import CASES, prepare_interpreter, same

MODULES = (interpreted_drafts, interpreted_inputs, interpreted_sampling)


def main() -> None:
    prepare_interpreter()
    results = {}
    for name, function in CASES.items():
        try:
            results[name] = "same" if same(*function()) else "different"
        except Exception as error:  # noqa: BLE001 - the test shows it
            results[name] = f"{type(error).__name__}: {error}"[:300]
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
