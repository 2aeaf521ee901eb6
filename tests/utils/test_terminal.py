"""Progress of long work in a terminal and outside of one."""

import io
from types import SimpleNamespace

from rich.console import Console
from rich.progress import BarColumn

from linrope.utils import terminal
from linrope.utils.terminal import progress_bar


def test_progress_is_a_line_now_and_then_outside_of_a_terminal(monkeypatch, capsys):
    seconds = iter([0, 10, 31, 40, 70, 71])  # when the bar is made, and at each step
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(terminal, "duration_text", lambda _: "a while")
    console = Console(file=io.StringIO())
    with progress_bar(console, BarColumn()) as bar:
        speed, unknown = bar.add_task("speed of [a]", total=4), bar.add_task("reading", total=None)
        for _ in range(3):
            bar.update(speed, advance=1)
        bar.advance(unknown, 100)
        bar.update(speed, visible=False)
    assert console.file.getvalue() == ""
    assert capsys.readouterr().err == "speed of [a]: 50 % after a while\nreading: a while\n"


def test_progress_is_a_bar_in_a_terminal(capsys):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_bar(console) as bar:
        assert list(bar.track([1, 2], description="asking")) == [1, 2]
    assert "asking" in console.file.getvalue()
    assert capsys.readouterr().err == ""
