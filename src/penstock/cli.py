"""The command line: its commands, and their exit codes.

Exit codes: 0 done, 2 wrong usage or bad input, 3 no feasible plan, 4 run failed, 130 interrupted.
Commands import what they need when they run, so that planning never loads torch.
"""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from penstock import __version__
from penstock.command_line import (
    bridge_commands,
    choose_command,
    cluster_commands,
    compare_command,
    job_commands,
    planning_commands,
    rehearse_command,
    simulate_command,
)
from penstock.command_line.removed_options import check_removed_options
from penstock.command_line.terminal import print_error, silence_output
from penstock.errors import INTERRUPTED, SIGNALLED, RunFailed

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(asked: bool) -> None:
    """Print the version and end, if asked."""
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool,
        typer.Option("-V", "--version", callback=print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Planned pipeline-parallel training for PyTorch."""


app.command("profile")(job_commands.profile)
app.command("plan")(planning_commands.plan)
app.command("simulate")(simulate_command.simulate)
app.command("rehearse", short_help="Carry out PLAN with processes that wait, not compute.")(
    rehearse_command.rehearse
)
app.command("compare")(compare_command.compare)
app.command("choose")(choose_command.choose)
app.command("train")(job_commands.train)
app.command("cluster")(cluster_commands.cluster)
app.command("launch")(cluster_commands.launch)
app.command("verify")(job_commands.verify)
app.command("export")(bridge_commands.export_plan)
app.command("import")(bridge_commands.import_layout)
app.command("report")(job_commands.report)
app.command("list")(job_commands.catalogue)


def main() -> None:
    """Run the command that the arguments name, and exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A file's name may hold bytes that are no text.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def run() -> int:
    """Run the command; returns its exit code and prints at most one line of error."""
    try:
        check_removed_options(sys.argv[1:])
        code: object = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's, when the reader has gone
            silence_output()
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
