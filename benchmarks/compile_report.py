"""The command `python -m benchmarks.compile_report`: what kernels compile to (`machine_code/report.py`)."""

import sys

from benchmarks.machine_code.report import main

if __name__ == "__main__":
    sys.exit(main())
