"""Parsers for logs of other programs: schedulers, container runtimes, installers, launchers, trainers."""
