"""A server is started, asked by clients and ended, and each result is there."""

import csv
import json

import pytest

from benchmarks.speed.serving import DECODING, FIRST, SECOND, Serving

SMALL = ["--models=tiny", "--prompt=300", "--tokens=8", "--requests=1", "--repeats=1", "--snapshot=64", "--segment=100"]


@pytest.mark.exhaustive
def test_turns_and_clients_are_measured(tmp_path, capsys):
    assert Serving.main([*SMALL, "--clients", "3", "1", f"--output={tmp_path}"]) == 0
    points = json.loads((tmp_path / "serving.json").read_text())["points"]
    with (tmp_path / "serving.csv").open(newline="") as file:
        assert [row["what"] for row in csv.DictReader(file)] == [point["what"] for point in points]
    found = {(point["what"], point["clients"]): point for point in points}
    assert list(found) == [(FIRST, 1), (SECOND, 1), (DECODING, 1), (DECODING, 3)]
    assert all(point["seconds"] > 0 for point in points)
    state = 2 * 8 * (8 + 1) * 4 + 2 * 4 + 3 * 3 * 16 * 4  # sums, decays, the tail of the convolution
    # at 64, 128, 192, 256, at the end with logits, and at the end of the answer; and the tokens, without the
    # separator, which all prompts share
    assert found[FIRST, 1]["cache_bytes"] == 6 * state + 257 * 4 + 4 * (299 + 31)
    assert 1 <= found[DECODING, 1]["tokens"] <= 8
    out = capsys.readouterr().out
    assert "of the first one's time to the first token" in " ".join(out.split())
    assert "tiny: 3 clients get" in out


def test_pictures_are_drawn_again(tmp_path):
    points = [Serving.point("tiny", DECODING, n, 100 * n, 1.0, 0.1) for n in (1, 3)]
    run = Serving(Serving.parse([*SMALL, "--clients", "1", "3", f"--output={tmp_path}"]), "a machine", points)
    assert run.gain("tiny") == [(3, 3.0)]
    assert list(run.figures()) == [""]


def test_the_gain_names_the_clients_that_it_is_compared_with():
    for clients, title, remarks in (
        (
            [1, 3],
            ": tokens/s at 3 over one client: tiny 3.0×",
            ["tiny: 3 clients get 3.0 times the tokens/s of one client"],
        ),
        (
            [2, 6],
            ": tokens/s at 6 over 2 clients: tiny 3.0×",
            ["tiny: 6 clients get 3.0 times the tokens/s of 2 clients"],
        ),
        ([4], "", []),
    ):
        options = Serving.parser().parse_args([*SMALL, "--clients", *map(str, clients)])
        run = Serving(options, "a machine", [Serving.point("tiny", DECODING, n, 100 * n, 1.0, 0.1) for n in clients])
        assert run.remarks() == remarks
        assert run.figures()[""].get_suptitle() == f"Clients are decoded together{title}"
