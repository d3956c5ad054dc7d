"""``python -m gradfilter`` is the command ``gradfilter``."""

import sys

from gradfilter.cli import main

sys.exit(main())
