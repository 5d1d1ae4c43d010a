"""``python -m tokenloom``: the command line, also from a source tree that is not installed."""

from tokenloom.cli.app import main

main()
