"""Recall by length and depth, and the data modules of the tasks beside MQAR."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.data.synthetic.copying import Induction
from linrope.errors import InputError
from linrope.evaluation import row_lengths as reading
from linrope.evaluation.recall_map import Recalled, answers, figure_of, recall_by_depth
from linrope.losses import IGNORE
from linrope.positions.base import PositionsConfig
from linrope.training import CopyDataModule, InductionDataModule, PasskeyDataModule
from tests.cli.conftest import read_csv
from tests.training.attached import attach, first_batches


class Remembers(torch.nn.Module):
    """A model that says at a mark what followed the last mark, if that was no more than `reach` tokens ago."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach, self.weight = reach, torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, state=None, segment_ids=None, return_state=False):
        seen = tokens if state is None else torch.cat((state, tokens), dim=1)
        logits = torch.zeros(*seen.shape, 9)
        for row, scores in zip(seen, logits):
            marks = (row == 0).nonzero().flatten().tolist()
            for earlier, later in itertools.pairwise(marks):
                if later - earlier <= self.reach:
                    scores[later, row[earlier + 1]] = 1.0
        return logits[:, -tokens.shape[1] :], seen


def test_a_model_is_right_as_far_back_as_it_remembers(monkeypatch):
    monkeypatch.setattr(reading, "SEGMENT", 7)  # the state goes on from piece to piece
    ticks = []
    found = list(recall_by_depth(Remembers(20), Induction(9), [12, 41], [0, 50, 100], 5, tick=lambda: ticks.append(1)))
    # at depth 0 the mark stands length - 1 tokens before the end, at 100 two
    assert [(c.length, c.depth) for c in found if c.answered == 1] == [(12, 0), (12, 50), (12, 100), (41, 100)]
    assert [(c.length, c.depth) for c in found if c.answered == 0] == [(41, 0), (41, 50)]
    assert len(ticks) == 6


def test_a_row_is_answered_where_all_its_tokens_are():
    inputs = torch.tensor([[0, 5, 0, 0], [0, 3, 0, 0]])
    targets = torch.tensor([[IGNORE, IGNORE, 5, 4], [IGNORE, IGNORE, 3, 0]])
    task = SimpleNamespace(require=lambda case: None, rows=lambda n_rows, case, seed: (inputs, targets))
    (found,) = recall_by_depth(Remembers(2), task, [4], [0], 2)
    # at the second mark the symbol after the first is said, right in both rows; at the third, the token after the
    # second, which is the mark: right in the second row alone
    assert (found.answered, found.tokens_right) == (0.5, 0.75)
    assert answers(Remembers(2), inputs, targets)[:, 2:].tolist() == [[True, False], [True, True]]


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)).save_pretrained(tmp_path / "some.model")
    return tmp_path / "some.model"


def test_the_command_writes_a_table_and_a_heat_map(model, text_file, tmp_path, capsys):
    args = ["recall", f"--ckpt_path={model}", f"--text={text_file}", "--fractions=[0.5,0.5,0]", "--rows=2"]
    assert main([*args, "--lengths", "96", "128", "--depths", "0", "100", f"--report={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"depth +96 +128", out)
    cases = read_csv(tmp_path / "out" / "recall.csv")
    expected = itertools.product(("96", "128"), ("0", "100"), "2")
    assert [(c["length"], c["depth"], c["rows"]) for c in cases] == list(expected)
    contents = json.loads((tmp_path / "out" / "recall.json").read_text())
    assert contents["command"].startswith("linrope recall --ckpt_path")
    assert len(contents["cases"]) == 4
    assert (tmp_path / "out" / "recall.png").read_bytes()[:4] == b"\x89PNG"


def test_a_heat_map_of_few_cases_holds_its_texts_and_leaves_missing_ones_white():
    title = "induction: rows answered, a-run-with-a-name-of-forty-characters/version_0, last"
    found = [Recalled(64, 0, 2, 1.0, 1.0), Recalled(64, 50, 2, 0.5, 0.5), Recalled(128, 0, 2, 0.0, 0.0)]
    for cases in (found[:1], found):  # Ctrl-C leaves the last length without its last depths
        figure = figure_of(cases, title)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        assert sorted(text.get_text() for text in axes.texts) == sorted(f"{100 * c.answered:.0f}" for c in cases)
        for text in (*figure.texts, axes.xaxis.label, axes.yaxis.label):
            low, high = text.get_window_extent().get_points()
            assert all(low >= 0)
            assert all(high <= figure.bbox.max)


def test_mistakes_are_named(model, text_file, capsys):
    for args, message in [
        (["--lengths", "10"], "--lengths and --depths: length=10 is too short for a pass key"),
        (["--depths", "101"], "depth=101 must be a whole number of percent"),
        (["--rows=0"], "--rows=0"),
        (["--text=/nowhere/at/all"], "'/nowhere/at/all' does not exist"),
        (["--task=mqar"], "--task='mqar' is unknown: choose one of 'passkey', 'induction'"),
        (["--lengths", "5000000"], "length=5000000 needs .* tokens of text"),
    ]:
        assert main(["recall", f"--ckpt_path={model}", f"--text={text_file}", *args]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_length_beyond_the_table_of_positions_is_named_before_the_first_row(text_file, tmp_path, capsys):
    positions = PositionsConfig("learned", length=100)
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, positions=positions))
    model.save_pretrained(tmp_path / "learned")
    args = ["recall", f"--ckpt_path={tmp_path / 'learned'}", f"--text={text_file}", "--rows=1"]
    assert main([*args, "--lengths", "96", "128"]) == 2
    assert "--lengths=128 is longer than the rows of model.positions.length=100" in capsys.readouterr().err


def test_the_tasks_share_order_resumption_and_named_cases(text_file):
    small = {"tokens_per_batch": 256, "test_rows": 4}
    text = {"path": str(text_file), "fractions": (0.6, 0.2, 0.2)}
    for data, names in [
        (CopyDataModule(stages=[(16, 1), (32, 1)], cases=[(16,), (64,)], **small), ["16", "64"]),
        (InductionDataModule(stages=[(16, 1)], cases=[(16,), (64, 50)], **small), ["16", "64@50%"]),
        (PasskeyDataModule(stages=[(96, 1)], cases=[(96,), (128, 0)], **text, **small), ["96", "128@0%"]),
    ]:
        attach(data)
        batches, evaluated = first_batches(data, 6), list(data.val_dataloader())
        attach(data, step=4)
        assert all(map(torch.equal, first_batches(data, 2), batches[4:]))
        assert list(dict.fromkeys(batch["case"] for batch in evaluated)) == names
        assert [batch["case"] for batch in evaluated[:2]] == names  # the first batches are of all cases
        assert sum(len(batch["inputs"]) for batch in evaluated) == 8
        json.dumps(data.order())  # plain values, for checkpoints
        assert data.samples_of(5) == "batches 5 … 5"


def test_what_the_tasks_cannot_serve_is_named(text_file):
    in_val = {"path": str(text_file), "cases": [(4000,)]}
    for module, options, message in (
        (CopyDataModule, {"cases": [(63,)]}, r"data\.cases: length=63 must be even"),
        (InductionDataModule, {"stages": [(2, 1)]}, r"data\.stages: length=2 must be 3 or more"),
        (PasskeyDataModule, {"path": ""}, r"data\.path is empty: give a path"),
        (PasskeyDataModule, {"cases": [(50,)]}, r"data\.cases: length=50 is too short"),
        (PasskeyDataModule, in_val, r"data\.cases in the val split: length=4000 needs"),
    ):
        with pytest.raises(InputError, match=message):
            module(**options)
