"""The command line: ``python -m maxconv`` and ``maxconv``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ._library import LibraryError
from ._version import __version__

__all__ = ["COMMANDS", "Command", "build_parser", "main"]


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with ``add_arguments(parser)`` and ``run(namespace) -> int``.

    ``extra`` is the extra of the distribution that the command takes, if it takes one.
    """

    module: str
    help: str
    extra: str | None = None


#: The subcommands by name. A module is imported only when its command is used.
COMMANDS = {
    "demo": Command("maxconv._demo", "add noise to a photograph and remove it again"),
    "bench": Command(
        "maxconv.bench", "time convolutions and whole models against torch and MAX", "bench"
    ),
    "doctor": Command("maxconv._doctor", "show versions, hardware, and which kernel runs and why"),
    "build": Command("maxconv._build", "compile what PyTorch's calls need, for an image"),
    "tune": Command("maxconv.tuner.command", "search a kernel's configurations", "tune"),
    "inspect": Command("maxconv._inspect", "show the GPU kernels' PTX, or what they take"),
}


def build_parser(commands: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Returns the parser; it knows the arguments of ``commands``, and of the rest the names only.

    Raises:
        ModuleNotFoundError: A command needs an extra that is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="maxconv", description="Convolutions for MAX graphs and PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"maxconv {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name in commands:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, or 1 after an error that is told."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        args = build_parser([name] if name in COMMANDS else []).parse_args(arguments)
        status: int = importlib.import_module(COMMANDS[args.command].module).run(args)
        # Where the reader of a pipe has gone, this is what meets it, not the interpreter's exit.
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        command = COMMANDS.get(name or "")
        ours = (error.name or "maxconv").startswith("maxconv")
        if _is_debug(arguments) or ours or command is None or command.extra is None:
            raise
        remedy = f"pip install 'maxconv[{command.extra}]'"
        print(f"maxconv {name}: {error.name} is not installed; {remedy}", file=sys.stderr)
        return 1
    except (LibraryError, OSError, ValueError) as error:
        if _is_debug(arguments):
            raise
        print(f"maxconv {name}: {error}", file=sys.stderr)
        return 1
    return status


def _is_debug(arguments: Sequence[str]) -> bool:
    return "--debug" in arguments
