"""Building blocks of the verbs: groups that import a verb when it is called, and option and argument types.

A command line after `--` belongs to the user and is passed on untouched.
"""

from __future__ import annotations

import difflib
import importlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.options import COUNT, FLAG, MAX_COUNT, Option
from bootseer.cli.output import Output
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class MayHaveCommand(click.Command):
    """Everything after the first `--` is the user's command, `ctx.meta["command"]`: no option in it is ours."""

    command_usage = "[-- COMMAND...]"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["command"] = tuple(args[place + 1 :])
            return super().parse_args(ctx, args[:place])
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if error.message.startswith(("Got unexpected", "No such")) and not getattr(error, "possibilities", ()):
                hint = f"a command goes after --, as `{ctx.command_path} ... -- python train.py`"
                raise click.UsageError(f"{error.message}\nhint: {hint}", ctx) from error
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), self.command_usage]


class WithCommand(MayHaveCommand):
    """The same, with a command required."""

    command_usage = "-- COMMAND..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        is_help = {"-h", "--help"}.intersection(words)
        if len(args) <= len(words) + 1 and not is_help and not ctx.resilient_parsing:  # the last: shell completion
            raise click.UsageError(f"no command: put it after --, as `{ctx.command_path} ... -- python train.py`", ctx)
        return super().parse_args(ctx, args)


def with_options(options: Sequence[Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds a table of options to a click command."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            text = f"{option.help} May be repeated." if option.many else option.help
            if option.kind == FLAG:
                flags = ["/".join(option.flags)] if option.flags[-1].startswith("--no-") else option.flags
                decorator = click.option(*flags, option.name, is_flag=True, default=option.default, help=text)
            else:
                decorator = click.option(
                    *option.flags,
                    option.name,
                    type=_type(option),
                    metavar=option.metavar,
                    multiple=option.many,
                    default=option.default,
                    help=text,
                )
            function = decorator(function)
        return function

    return decorate


def _type(option: Option) -> click.ParamType[Any] | None:
    if option.kind == COUNT:
        return Count(option.least, None if option.most == MAX_COUNT else option.most)
    return click.Choice(option.choices) if option.choices else None


def json_option(schema: str) -> Callable[[Any], Any]:
    """The option `--json`; the verb gets an `Output` as `output`."""
    return click.option(
        "--json",
        "output",
        is_flag=True,
        help=f"Print JSON (schema {schema}).",
        callback=lambda ctx, param, value: Output(schema, value),
    )


class Group(click.Group):
    """Verbs by name. Each maps to a module of `bootseer.cli` with a `NAME_command`, imported only when called, and to
    its short help."""

    def __init__(self, *args: Any, verbs: Mapping[str, tuple[str, str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.subcommand_metavar = "VERB [ARGS]..."
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        module, short_help = self.verbs[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"bootseer.cli.{module}"), f"{cmd_name}_command")
        command.short_help = short_help
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.verbs and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no verb {name!r}{self._suggestion(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        """ "Did you mean" with similar verbs, and with groups that have a verb of this name."""
        near = [f"{ctx.command_path} {verb}" for verb in difflib.get_close_matches(name, self.verbs)]
        for verb, (module, _) in self.verbs.items():
            group = self.get_command(ctx, verb) if module in ("verbs", "serve") else None  # others have no verbs
            if isinstance(group, Group) and name in group.verbs:
                near.append(f"{ctx.command_path} {verb} {name}")
        return f": did you mean `{'` or `'.join(near)}`?" if near else ""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs and options that begin so. Click's own would import all verbs."""
        from click.shell_completion import CompletionItem

        named = [(name, text) for name, (_, text) in self.verbs.items() if name.startswith(incomplete)]
        items = [CompletionItem(name, help=text) for name, text in named]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in self.verbs.items()])


def complete_files() -> None:
    """Have the shells complete names of files where click completes nothing, and in the user's command."""
    from click import shell_completion as shells

    class Files(shells.ShellComplete):
        def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
            found = [] if "--" in args else super().get_completions(args, incomplete)
            return found or [shells.CompletionItem(incomplete, type="file")]

    for shell in (shells.BashComplete, shells.ZshComplete, shells.FishComplete):
        # Fish cut descriptions at commas, and found no files below `~` and variables.
        script = shell.source_template.replace('split ","', 'split -m 1 ","')
        script = script.replace("__fish_complete_path $metadata[2]", "complete -C\"'' \"(commandline -ct)")
        shells.add_completion_class(type(shell.__name__, (Files, shell), {"source_template": script}))


def listen_address(text: str, example: int, *, least: int = 1) -> tuple[str, int]:
    """Host and port of a `--listen`; with `least` 0, port 0 means any free one. Raises `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not least <= int(port) < 1 << 16:
        hint = f"for example 127.0.0.1:{example} or [::1]:{example}"
        raise UsageError(f"--listen {text}: not an address with a port", hint=hint)
    return host.strip("[]"), int(port)


def stop_event() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set from now on."""
    stop = threading.Event()

    def end(*_: object) -> None:
        # Not in this thread, which may hold the event's lock inside of `wait`.
        threading.Thread(target=stop.set, name="bootseer-stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def price_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--price` and `--currency`; the verb gets them as `price_per_gpu_hour` (None without one) and `currency`."""
    price = click.option("--price", "price_per_gpu_hour", type=Number(0), metavar="MONEY",
                         help="Price of a GPU-hour, to show costs.")  # fmt: skip
    currency = click.option("--currency", metavar="SIGN", default="$", envvar="BOOTSEER_CURRENCY", show_default=True,
                            show_envvar=True, help="Currency of the price, such as $ or EUR.")  # fmt: skip
    return price(currency(function))


class Count(click.IntRange):
    name = "integer"  # instead of "integer range", in help and messages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if self.max is None and number > MAX_COUNT:  # a limit that is not worth a place in the help
            self.fail(f"{value} is not a number up to {MAX_COUNT:,}.", param, ctx)
        return number


class Number(click.FloatRange):
    """A number that is small enough to stay finite in products."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not number <= 1e9:  # also catches nan
            self.fail(f"{value} is not a number up to 1,000,000,000.", param, ctx)
        return number
