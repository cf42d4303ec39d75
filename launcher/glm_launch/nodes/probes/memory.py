"""Print MemAvailable in bytes, once a second, until standard output closes.

python3 - < memory.py
"""

import sys
import time


def available() -> int:
    with open("/proc/meminfo") as lines:  # noqa: PTH123 (Python 3.8, one file)
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    while True:
        sys.stdout.write(f"{available()}\n")
        sys.stdout.flush()
        time.sleep(1.0)
