"""``python -m gradfilter.bench layers`` is ``gradfilter bench layers``."""

import sys

from gradfilter.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
