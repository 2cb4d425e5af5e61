"""``python -m t2t`` is ``t2t``."""

import sys

from t2t.cli import main

if __name__ == "__main__":
    sys.exit(main())
