"""``python -m ficco``."""

import sys

from ficco.tools.cli import main

sys.exit(main())
