"""`python -m polar_trl`."""

import sys

from polar_trl.cli import main

sys.exit(main())
