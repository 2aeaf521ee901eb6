"""`linrope fit`: train a language model."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.cli.output import _command_line, _say
from linrope.cli.training import TrainingCLI
from linrope.training.callbacks.interruption import Interrupted


def fit(args: Sequence[str]) -> None:
    """Train a language model."""
    cli = TrainingCLI("fit", args, fit.__doc__)
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.ckpt_path, weights_only=True)
    except Interrupted as interrupted:
        if not cli.trainer.is_global_zero:
            pass  # the first rank speaks for all
        elif interrupted.checkpoint is None:
            again = f"resume from {cli.ckpt_path} again" if cli.ckpt_path else "there is nothing to resume"
            _say(f"stopped before a step was finished: {again}.")
        else:
            resume = _command_line("fit", _without_option(args, "--ckpt_path"), "--ckpt_path", interrupted.checkpoint)
            _say(f"stopped after step {interrupted.step}. To go on from there:\n  {resume}")
        raise
    if cli.trainer.is_global_zero:
        lines = [f"\ncheckpoint  {(path := cli.last_checkpoint.path)}"]
        if cli.datamodule.tokenizer is not None:  # tokens that nobody can read are not written
            prompt = cli.config_init.sample.prompt or "import "
            lines.append(f"sample      {_command_line('generate', ['--ckpt_path', path, '--prompt', prompt])}")
        cli.console.print(*lines, sep="\n", markup=False, soft_wrap=True)


def _without_option(args: Sequence[str], option: str) -> list[str]:
    """`args` without `option VALUE` and `option=VALUE`."""
    kept = [arg for arg in args if not arg.startswith(f"{option}=")]
    while option in kept:
        at = kept.index(option)
        del kept[at : at + 2]
    return kept
