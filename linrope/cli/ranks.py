"""A run on several ranks: they are compared at its start, and each error is printed once, with its rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from torch.distributed import DistError
from torch.distributed.constants import default_pg_timeout

from linrope.cli.output import HEAD_START, say, say_once
from linrope.errors import InputError, Interrupted, LeftToAnotherRank, NonFiniteError, NothingToDo, RankLost
from linrope.training.agreement import require_agreement, run_values
from linrope.training.callbacks.rank_progress import RankProgress
from linrope.training.rank_board import RankBoard, is_of_collective
from linrope.training.rank_watch import RankWatch

LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (TorchElasticEnvironment, SLURMEnvironment)
"""Those whose environment variables tell a process its rank before it has a Trainer."""
_boards: list[RankBoard] = []
"""The board of the run of this process, if it has several ranks."""


def require_launched(trainer: Trainer) -> None:
    """Raise InputError if a launcher has started another number of processes than the trainer has devices."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None and TorchElasticEnvironment.detect():  # each process would train by itself
        environment = TorchElasticEnvironment()
    try:
        if environment is not None:
            environment.validate_settings(trainer.num_devices, trainer.num_nodes)
    except ValueError as error:
        raise InputError(
            f"trainer.devices={trainer.num_devices} × trainer.num_nodes={trainer.num_nodes} are not the "
            f"{environment.world_size()} processes that the launcher has started: set them to what it starts."
        ) from error
    _warn_of_shared_store()


def _warn_of_shared_store() -> None:
    """Warn if torchrun keeps one server for all restarts on several machines: the ranks would read there what those of
    an earlier attempt have left, in torch.distributed too."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if restarts > 0 and machines > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        say_once(
            "warning: torchrun cannot restart this run on several machines: start it on all of them with "
            "--rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment."
        )


def compare_ranks(trainer: Trainer, config: dict[str, Any], strategy: Any) -> None:
    """Let the trainer's strategy compare the ranks right before it sets up their processes: all have started by then.

    Args:
        trainer: of this rank.
        config: all options of the run; they and the versions of packages must be the same on all ranks.
        strategy: the option `trainer.strategy`, whose `timeout` is how long to wait for all ranks.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.world_size == 1 or environment is None:
        return
    options = strategy.get("init_args", {}) if isinstance(strategy, Namespace) else {}
    seconds = (options.get("timeout") or default_pg_timeout).total_seconds()
    setup = trainer.strategy.setup_environment

    def setup_environment() -> None:
        try:
            board = _open_board(environment, trainer.global_rank, trainer.world_size, seconds)
        except DistError as error:
            place = f"MASTER_ADDR={environment.main_address}, MASTER_PORT={environment.main_port}"
            reason = str(error).partition("\n")[0]
            raise RankLost(f"the ranks do not meet at {place} within {seconds:g} s: {reason}", None) from error
        board.launcher = trainer.strategy.launcher
        require_agreement(board, run_values(config), seconds)
        RankWatch(board, seconds, say, partial(_end_process, board, 1)).start()
        trainer.callbacks.append(RankProgress(board))
        setup()

    trainer.strategy.setup_environment = setup_environment


def _open_board(environment: ClusterEnvironment, rank: int, world_size: int, seconds: float) -> RankBoard:
    """The board of this process's run. DistError if its server does not answer in `seconds`."""
    board = RankBoard(environment, rank, world_size, seconds)
    # When this process ends, after its error is printed. As atexit, but also in processes of multiprocessing.
    Finalize(None, board.serve, (3 * HEAD_START,), exitpriority=0)
    _boards[:] = [board]
    return board


@contextmanager
def errors_printed_once() -> Iterator[None]:
    """Decides for the errors of a command which rank prints them; it may decorate the command.

    An error of a collective becomes `RankLost`, which names the rank to blame; the error that another rank prints
    becomes `LeftToAnotherRank`. InputError and NonFiniteError of one rank alone are marked `of_this_rank`.
    """
    try:
        yield
    except (Interrupted, NothingToDo):
        raise
    except Exception as error:
        board = _boards[0] if _boards else _board_of_launcher(error)
        if board is None:
            raise
        Finalize(None, _end_process, (board, 2 if isinstance(error, InputError) else 1), exitpriority=-1)
        if is_of_collective(error):
            raise board.why_collective_failed(error) from None
        with suppress(DistError):
            _leave_or_mark(board, error)
        raise
    finally:
        if _boards:
            _boards.pop().end()


def _end_process(board: RankBoard, code: int) -> None:
    """End this process, and those that it has started, at once: torch would first wait for collectives that hang."""
    if board.launcher is not None:
        board.launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _board_of_launcher(error: Exception) -> RankBoard | None:
    """The board of a run that fails before it has a Trainer; None if no launcher says that it has several ranks.

    If rank 0 is not there, it has not met the error: it is one of this rank."""
    try:
        environment = next((one() for one in LAUNCHERS if one.detect()), None)
    except RuntimeError:  # a launcher that is set up wrongly, which Lightning says as soon as there is a Trainer
        return None
    if environment is None or environment.world_size() == 1:
        return None
    try:
        return _open_board(environment, environment.global_rank(), environment.world_size(), HEAD_START)
    except DistError:
        _mark(error)
        return None


def _leave_or_mark(board: RankBoard, error: Exception) -> None:
    """Raise LeftToAnotherRank if rank 0, or else the lowest rank, has the same error; mark one of this rank alone."""
    if isinstance(error, RankLost):
        if not board.errors().get(board.rank):
            board.announce(str(error), own=True)
        return
    text = f"{type(error).__name__}: {error}"
    board.announce(text, own=True)
    if board.rank == 0:
        return
    # A launcher ends all processes once one has: the rank that prints needs its time too.
    time.sleep(HEAD_START)
    if any(rank < board.rank and one["text"] == text for rank, one in board.errors().items()):
        raise LeftToAnotherRank(2 if isinstance(error, InputError) else 1) from error
    _mark(error)


def _mark(error: Exception) -> None:
    if isinstance(error, InputError | NonFiniteError):
        error.of_this_rank = True
