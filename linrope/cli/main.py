"""The command line: `linrope fit | validate | test | plan | recall | generate | prepare | export`.

The first three are Lightning's: every option of its Trainer can be set, in YAML or as `--trainer.OPTION`. `plan` takes
the same options, and runs nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from jsonargparse import set_parsing_settings
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from linrope.cli.export import export
from linrope.cli.fit import fit
from linrope.cli.generate import generate
from linrope.cli.output import _say
from linrope.cli.plan import plan
from linrope.cli.prepare import prepare
from linrope.cli.recall import recall
from linrope.cli.test import test
from linrope.cli.training import quiet_lightning
from linrope.cli.validate import validate
from linrope.data.corpus.sequences import DocumentChanged
from linrope.errors import InputError, NonFiniteError, suggest
from linrope.training.callbacks.interruption import Interrupted
from linrope.training.checkpoint import (
    CheckpointError,
)
from linrope.training.ranks import is_first_rank, leave_error_to_first_rank

set_parsing_settings(docstring_parse_attribute_docstrings=True)


DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for this user, too, and for one file


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "plan": plan,
    "recall": recall,
    "generate": generate,
    "prepare": prepare,
    "export": export,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (without the program's name; by default the process's own).

    Returns:
        The exit code: 0; 1 where a run failed; 2 for a mistake in what it was given; 128 + N where signal N ended it.
    """
    args = list(sys.argv[1:] if args is None else args)
    quiet_lightning()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_help())
        elif args[0] in COMMANDS:
            COMMANDS[args[0]](args[1:])
        else:
            raise InputError(
                f"unknown command {args[0]!r}: choose one of {', '.join(COMMANDS)}.{suggest(args[0], COMMANDS)}"
            )
    except (InputError, MisconfigurationException, NonFiniteError) as error:  # the same on all ranks
        if not leave_error_to_first_rank():
            _say(f"error: {error}")
        return 1 if isinstance(error, NonFiniteError) else 2
    except (DocumentChanged, CheckpointError) as error:
        _say(f"error: {error}")
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        return 128 + signal.SIGPIPE  # the reader, `head` perhaps, has enough
    except KeyboardInterrupt:
        if is_first_rank():
            _say("interrupted.")
        return 128 + signal.SIGINT
    except SystemExit as exit_:
        if isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            return 128 + signal.SIGINT
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
            _say(f"error: {error}. Make room; a training run then resumes with --ckpt_path last.")
        elif is_first_rank():
            raise
        else:
            _say(traceback.format_exc())  # with the number of the rank
        return 1
    return 0


def _help() -> str:
    lines = [
        "usage: linrope COMMAND [options]\n",
        "Language models with linear attention and rotary positions: train them and let them write.\n",
        "commands:",
        *(f"  {name:<10}{command.__doc__}" for name, command in COMMANDS.items()),
        "\n`linrope COMMAND --help` lists a command's options.",
        "A first run: linrope fit --config configs/quickstart.yaml",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
