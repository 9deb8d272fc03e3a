"""Completion in the shell."""

from __future__ import annotations

from click import shell_completion as shells


class _Files(shells.ShellComplete):
    """Completes file names where click completes nothing, and in the user's command, of which it knows nothing."""

    def get_completions(self, args: list[str], incomplete: str) -> list[shells.CompletionItem]:
        found = [] if "--" in args else super().get_completions(args, incomplete)
        return found or [shells.CompletionItem(incomplete, type="file")]


def complete_files() -> None:
    """Have the shells complete file names, too."""
    for shell in (shells.BashComplete, shells.ZshComplete, shells.FishComplete):
        shells.add_completion_class(type(shell.__name__, (_Files, shell), {}))
