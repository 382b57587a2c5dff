"""`python -m fastformer`, and so `torchrun -m fastformer`: the command line."""

import sys

from fastformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
