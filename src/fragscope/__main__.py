"""`python -m fragscope` is the same program as `fragscope`."""

import sys

from fragscope.cli import main

sys.exit(main())
