"""The command line: its commands, and their exit codes.

Exit codes: 0 done, 2 wrong usage or bad input, 3 no feasible plan, 4 run failed, 130 interrupted.
Commands import what they need when they run, so that planning never loads torch.
"""

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.commands.options import with_options
from penstock.commands.terminal import print_error
from penstock.errors import INTERRUPTED, SIGNALLED, RunFailed
from penstock.waiting import print_bare_lines

GROUPS = {
    "Plan": {
        "profile": "job_commands.profile",
        "cluster": "cluster_commands.cluster",
        "plan": "planning_commands.plan",
        "compare": "compare_command.compare",
        "choose": "choose_command.choose",
        "export": "bridge_commands.export_plan",
        "import": "bridge_commands.import_layout",
    },
    "Train": {
        "init": "init_command.init",
        "train": "job_commands.train",
        "verify": "job_commands.verify",
        "launch": "cluster_commands.launch",
    },
    "Inspect": {
        "simulate": "simulate_command.simulate",
        "rehearse": "rehearse_command.rehearse",
        "report": "job_commands.report",
        "list": "job_commands.catalogue",
        "doctor": "doctor_command.doctor",
    },
}
"""Commands by group and name: paths of functions, relative to `penstock.commands`."""

COMMANDS = {name: path for group in GROUPS.values() for name, path in group.items()}

COMPLETING = "_PENSTOCK_COMPLETE"
"""The environment variable by which a shell requests that typer completes a line."""

SHELL_OPTIONS = ("--install-completion", "--show-completion")

SHORT_HELP = {"rehearse": "Carry out PLAN with processes that wait, not compute."}


def print_version(wanted: bool) -> None:
    """Print the version and end, if requested."""
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


def penstock(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Planned pipeline-parallel training for PyTorch."""


class GroupedCommands(TyperGroup):
    """Commands that the help lists in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands of each group, with the first sentence of their help."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                helps = [self.commands[name].get_short_help_str(formatter.width) for name in names]
                formatter.write_dl([*zip(names, helps, strict=True)])


def app_of(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """The command line with these commands; the modules of others are not imported."""
    app = typer.Typer(
        name="penstock",
        cls=GroupedCommands,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(penstock)
    for name in names:
        module, _, function = COMMANDS[name].rpartition(".")
        command = vars(import_module(f"penstock.commands.{module}"))[function]
        app.command(name, short_help=SHORT_HELP.get(name))(with_options(command))
    return app


def main() -> None:
    """Run the command that the arguments name, and exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A file's name may hold bytes that are no text.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def run() -> int:
    """Run the command; returns its exit code and prints at most one line of error."""
    print_bare_lines()
    arguments = sys.argv[1:] or ["--help"]
    if COMPLETING in os.environ or arguments[0] in SHELL_OPTIONS:
        words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
        app = app_of([word for word in words[1:2] if word in COMMANDS] or COMMANDS)
        app(arguments, prog_name="penstock")
    try:
        app = app_of(arguments[:1] if arguments[0] in COMMANDS else COMMANDS)
        code: object = app(arguments, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's, when the reader has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if isinstance(ended.code, int) and ended.code > SIGNALLED:
            raise
        problem = f"the job's own code ended the program (sys.exit({ended.code!r}))"
        return print_error(RunFailed(f"{problem}; let its functions return"))
    except (Exception, KeyboardInterrupt) as error:
        return print_error(error)
    if code == INTERRUPTED:
        return print_error(KeyboardInterrupt())
    return code if isinstance(code, int) else 0
