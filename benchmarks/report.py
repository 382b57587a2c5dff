"""The command `python -m benchmarks.report`: one page of everything that was measured (`publish/report.py`)."""

from benchmarks.publish.report import main

if __name__ == "__main__":
    raise SystemExit(main())
