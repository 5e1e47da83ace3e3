"""``python -m maxconv``."""

import sys

from .cli import main

sys.exit(main())
