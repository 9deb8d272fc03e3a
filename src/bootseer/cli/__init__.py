"""The command line: a module for each family of verbs, imported only when one of them is called."""
