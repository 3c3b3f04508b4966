"""The program: command groups found by file, errors turned into exit codes.

A command group is a module of this package with a `register(app)` function; no list names them. `register` imports
typer and nothing heavier, and a command's body imports what it needs when it runs: that is what keeps `--help` and
`plan` fast and free of torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outsize import __version__
from outsize.base import errors
from outsize.base.waypoints import Waypoints

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# BadParameter is a UsageError is a ClickException. typer may bring a copy of click of its own, so the class is taken
# from what typer shows in public rather than from either module.
_USAGE_ERRORS: Any = typer.BadParameter.__bases__[0].__bases__[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and give its exit code.

    An OutsizeError is printed without a traceback and gives its own code; anything else keeps its traceback and ends
    the interpreter with 1.
    """
    waypoints = Waypoints.of_process()
    waypoints.mark("Python started")
    app = build_app()
    try:
        result = app(
            prog_name="outsize",
            args=None if arguments is None else list(arguments),
            standalone_mode=False,
            obj=waypoints,  # what a command finds as its context's object
        )
    except errors.OutsizeError as error:
        _print_error(error)
        return error.exit_code
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except _USAGE_ERRORS as error:
        error.show(sys.stderr)
        return int(error.exit_code)
    return result if isinstance(result, int) else errors.EXIT_COMPLETED


def build_app() -> typer.Typer:
    """The application with every command group of this package."""
    app = typer.Typer(
        name="outsize",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=exit_code_table())(_options)
    package = importlib.import_module("outsize.cli")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    for name in names:
        if name != "main" and not name.startswith("_"):
            importlib.import_module(f"outsize.cli.{name}").register(app)
    return app


def exit_code_table() -> str:
    """All exit codes with their meaning, from the error classes themselves."""
    found = {
        errors.EXIT_COMPLETED: "completed",
        1: "a defect of ours, with a traceback",
        errors.EXIT_STOPPED: "stopped as asked, and can be resumed",
        EXIT_INTERRUPTED: "interrupted",
    }
    for one in errors.OutsizeError.__subclasses__():
        meaning = (one.__doc__ or "").splitlines()[0].rstrip(".")
        found[one.exit_code] = meaning[:1].lower() + meaning[1:]
    rows = (f"{code:>5}  {found[code]}" for code in sorted(found))
    return "\b\nExit codes:\n" + "\n".join(rows)  # \b keeps click from folding the lines


def _print_version(is_wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if is_wanted:
        print(f"outsize {__version__}")
        raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Fine-tune image and language models larger than the card that trains them."""


def _print_error(error: errors.OutsizeError) -> None:
    """The message alone, on standard error, never folded into columns."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
