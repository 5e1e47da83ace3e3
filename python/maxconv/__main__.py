"""``python -m maxconv``."""

import sys

from ._cli import main

sys.exit(main())
