"""The page of the paper's claims."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import seed_claims
from benchmarks.experiments.seed_claims import CLAIMS, HELD, NOT, OPEN, Claim, Finding, page

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def write_runs(folder, losses):
    """A finished run for each variant and seed, with one validation half way and one at the end."""
    (folder / "runs").mkdir(parents=True)
    for variant, seeds in losses.items():
        for seed, (half, end) in enumerate(seeds):
            curve = [{"step": 5, "seconds": 1.0, "val_bpb": half}, {"step": 10, "seconds": 2.0, "val_bpb": end}]
            run = {"variant": variant, "seed": seed, "parameters": 3, "curve": curve, "test": {}}
            (folder / "runs" / f"{variant}-seed{seed}.json").write_text(json.dumps(run))
    (folder / "speeds.json").write_text(json.dumps(dict.fromkeys(losses, 0.1)))


@pytest.mark.parametrize(
    ("rope", "verdict"),
    [([(3.0, 1.0), (3.1, 1.1)], HELD), ([(4.0, 3.0), (4.1, 3.1)], NOT), ([(3.0, 1.0), (3.1, 3.2)], OPEN)],
    ids=["held", "did not hold", "open"],
)
def test_a_verdict_follows_from_the_interval_of_the_differences(rope, verdict, tmp_path):
    """Without RoPE the runs end at 2.0 and 2.1, so the difference is -1, +1, or between -1 and +1.1."""
    write_runs(tmp_path / "family" / "performer", {"rope": rope, "none": [(3.0, 2.0), (3.0, 2.1)]})
    found = seed_claims.performer(tmp_path)
    assert found.verdict == verdict
    if verdict == HELD:  # 2.0 is half way between the two validations, 7.5 of 10 steps, and so is 2.1
        assert "-48.8 % ± 0.0 %" in found.text
        assert "75 % of the steps" in found.text


def test_the_page_has_an_entry_and_a_line_for_each_claim(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "curve.png").touch()
    claims = [
        Claim("Tested", "It is said.", "python -m pytest", lambda results: Finding("It was 3.", HELD, "curve.png")),
        Claim("Elsewhere", "It is said too.", "", lambda results: Finding("", "not tested here"), "configs/x.yaml"),
    ]
    text = page(tmp_path / "results", claims, tmp_path / "docs" / "page.md")
    assert "| Tested | held |\n| Elsewhere | not tested here |" in text
    assert "## Tested\n\nIt is said.\n\n```sh\npython -m pytest\n```\n\nIt was 3.\n\n**Held.**" in text
    assert "![Tested](../results/curve.png)" in text
    assert "**Not tested here.**\n\nAt the paper's scale: configs/x.yaml." in text


def test_the_page_in_docs_says_what_the_results_say():
    assert (ROOT / "docs" / "seed-claims.md").read_text() == page(RESULTS, CLAIMS, ROOT / "docs" / "seed-claims.md")


def test_missing_results_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        seed_claims.main([f"--results={tmp_path}", f"--output={tmp_path / 'page.md'}"])
    assert "decay.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
