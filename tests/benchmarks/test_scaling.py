"""The scaling benchmark runs, shows every method at every length, and names what it cannot do."""

import pytest

from benchmarks import scaling


def test_it_prints_a_row_for_each_length(capsys):
    scaling.main(["--lengths", "33", "65", "--heads", "1", "--head_dim", "8", "--repeats", "1"])
    printed = capsys.readouterr().out
    for word in (*scaling.METHODS, "33", "65", "softmax / linear", "forward+backward"):
        assert word in printed.replace("\n", " ")


def test_all_methods_see_the_same_sizes():
    options = scaling.parse(["--lengths", "40", "--heads", "2", "--head_dim", "8", "--repeats", "1"])
    medians = scaling.measure(40, options)
    assert medians.keys() == scaling.METHODS.keys()
    assert all(t > 0 for t in medians.values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lengths", "0"], "--lengths 0: a length is at least 1"),
        (["--methods", "flash"], "invalid choice: 'flash'"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
    ],
)
def test_bad_options_are_named_before_any_run(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        scaling.main(args)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
