"""`python -m octavo` is the `octavo` command."""

import sys

from octavo.cli import program

sys.exit(program())
