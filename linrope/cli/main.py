"""The command line: `linrope COMMAND [options]`. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

import linrope
from linrope.cli.commands import COMMANDS
from linrope.cli.imports import import_code
from linrope.cli.output import discard, format_warning, leave_error_to_first_rank, rank, say, say_once
from linrope.errors import (
    DISK_IS_FULL,
    CheckpointError,
    DamagedFile,
    DocumentChanged,
    InputError,
    Interrupted,
    LeftToAnotherRank,
    NonFiniteError,
    NothingToDo,
    RankLost,
    WorkerKilled,
    suggest,
)

HELP = "\n".join(
    [
        "usage: linrope COMMAND [options]\n",
        "Language models with linear attention and rotary position embeddings: train them and generate text.\n",
        "commands:",
        *(f"  {name:<10}{text}" for name, text in COMMANDS.items()),
        "\n`linrope COMMAND --help` lists a command's options; `linrope --version` prints the version.",
        "`linrope COMMAND --import FILE.py` imports code of your own first: feature maps, models, data.",
        "A first run: linrope fit --config configs/quickstart.yaml",
    ]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (without the program's name; by default the process's own).

    Of a run on several devices, rank 0 prints the errors that all ranks meet; an error of one rank is printed by that
    rank, with its number. Returns the exit code: 0; 1 if a run failed; 2 for a mistake in the input; 128 + N if signal
    N ended it.
    """
    args = list(sys.argv[1:] if args is None else args)
    warnings.formatwarning = format_warning
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        args = import_code(args)
        if not args or args[0] in ("-h", "--help"):
            print(HELP)
        elif args[0] in ("-V", "--version"):
            print(f"linrope {linrope.__version__}")
        elif args[0] in COMMANDS:
            importlib.import_module(f"linrope.cli.{args[0]}").run(args[1:])
        else:
            raise InputError(
                f"unknown command {args[0]!r}: choose one of {', '.join(COMMANDS)}.{suggest(args[0], COMMANDS)}"
            )
    except (InputError, NonFiniteError) as error:
        if error.of_this_rank or isinstance(error, DamagedFile) or not leave_error_to_first_rank():
            say(f"error: {error}")
        return 1 if isinstance(error, NonFiniteError) else 2
    except (DocumentChanged, CheckpointError, WorkerKilled) as error:
        say(f"error: {error}")
        return 1
    except RankLost as lost:
        if lost.printed_by in (None, rank()):
            say(f"error: {lost}")
        return 1
    except LeftToAnotherRank as left:
        return left.code
    except NothingToDo as done:
        say_once(str(done))
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except BrokenPipeError:
        discard(sys.stdout)  # or Python complains again as it exits
        return 128 + signal.SIGPIPE  # the reader, `head` perhaps, has enough
    except KeyboardInterrupt:
        say_once("interrupted.")
        return 128 + signal.SIGINT
    except SystemExit as exit_:
        if isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            say_once("interrupted.")
            return 128 + signal.SIGINT
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
            resume = "; the run then resumes with --ckpt_path last" if args[:1] == ["fit"] else ""
            say(f"error: {error}. Make room{resume}.")
        elif rank() == 0:
            raise
        else:
            say(traceback.format_exc())  # with the number of the rank
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
