"""``python -m toeplens`` is the command line."""

from toeplens.cli import main

main()
