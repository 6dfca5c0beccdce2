"""``python -m ficco``."""

import sys

from ficco.cli import main

sys.exit(main())
