"""`python -m fastff` is the command `fastff`."""

from .cli import main

main()
