"""``python -m kvbelay``: the command ``kvbelay`` of this interpreter, also where that is not on the path."""

from kvbelay.cli.main import main

main()
