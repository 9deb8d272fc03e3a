"""`python -m bootseer`."""

from bootseer.cli.main import main

main()
