"""A grid's file is checked whole before anything runs."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.experiments.grid import n_steps, read_grid, settings_of
from linrope.errors import InputError

GRIDS = sorted((Path(__file__).parents[3] / "benchmarks" / "grids").glob("*.yaml"))
SMALL = {
    "title": "Small",
    "tokens": 1000,
    "seeds": [0, 1],
    "reference": "linear",
    "model": {"d_model": 32, "n_layers": 1, "n_heads": 2},
    "data": {"context": 16, "batch_size": 4},
    "variants": {"linear": {}, "softmax": {"model.attention": "softmax"}},
}


def grid_of(tmp_path, **changes):
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return read_grid(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_shipped_grids_are_right(path):
    grid = read_grid(path)
    sizes = {name: own.n_parameters for name, own in settings_of(grid).items()}
    assert max(sizes.values()) <= 1.02 * min(sizes.values())
    assert len(grid.seeds) >= 2


def test_a_variant_changes_what_its_paths_name(tmp_path):
    far, none = {"model.rope.base": 500.0, "optimizer.lr": 0.5}, {"model.rope": None, "data.context": 32}
    settings = settings_of(grid_of(tmp_path, variants={"linear": {}, "far": far, "none": none}))
    assert settings["far"].model_config.rope.base == 500.0
    assert settings["far"].optimizer == {"lr": 0.5}
    assert settings["none"].model_config.rope is None
    assert settings["none"].plan.tokens_at(1) == 128
    assert settings["linear"].model_config.rope.base == 10000.0
    assert len({own.fingerprint for own in settings.values()}) == 3


def test_runs_go_seed_by_seed_and_further_seeds_come_last(tmp_path):
    runs = grid_of(tmp_path, more_seeds={"softmax": [7, 5], "linear": [5]}).runs
    assert runs[:4] == [("linear", 0), ("softmax", 0), ("linear", 1), ("softmax", 1)]
    assert runs[4:] == [("linear", 5), ("softmax", 5), ("softmax", 7)]


def test_models_are_made_equally_large(tmp_path):
    variants = {"linear": {}, "gated": {"model.output_gate": True}}
    settings = settings_of(grid_of(tmp_path, variants=variants))
    reference, gated = (settings[name].n_parameters for name in ("linear", "gated"))
    # one unit of the MLP's width is three vectors of 32
    assert abs(gated - reference) <= 3 * 32 / 2
    assert settings["gated"].model_config.mlp_width < settings["linear"].model_config.mlp_width
    own = settings_of(grid_of(tmp_path, variants=variants, match_parameters=False))["gated"]
    assert own.n_parameters == reference + 32 * 32


def test_steps_follow_from_tokens_or_from_minutes(tmp_path):
    grid = grid_of(tmp_path, validations=5)
    settings = settings_of(grid)["linear"]
    assert n_steps(grid, settings, tokens_per_second=1.0) == 15  # of 64 tokens
    assert n_steps(grid_of(tmp_path, validations=4), settings, 1.0) == 12  # so that the last validation is the end's
    assert n_steps(grid_of(tmp_path, validations=20), settings, 1.0) == 15
    by_time = grid_of(tmp_path, tokens=None, minutes=0.5, validations=5)
    assert n_steps(by_time, settings, tokens_per_second=640.0) == 300


def with_x(options, **changes):
    """A change of SMALL: a variant x with these options."""
    return {"variants": {"linear": {}, "x": options}, **changes}


def with_stage(stage_tokens, seq_len, **changes):
    return with_x({"data.curriculum": [{"tokens": stage_tokens, "seq_len": seq_len, "batch_size": 4}]}, **changes)


CONTIGUOUS = {**SMALL["data"], "contiguous": True}
MISTAKES = [
    ({"titel": "x"}, "'titel' is not an option of Grid. Did you mean 'title'?"),
    ({"reference": None}, "needs 'reference', which has no default"),
    ({"reference": "lineer"}, "reference='lineer' is unknown: choose one of 'linear', 'softmax'."),
    ({"task": "images"}, "task='images' is unknown"),
    ({"seeds": [0]}, r"seeds=\[0\]: an interval needs two seeds or more"),
    ({"seeds": [1, 1]}, r"seeds=\[1, 1\] must be different whole numbers"),
    ({"seeds": [0, -1]}, "must be different whole numbers from 0"),
    ({"seeds": [0, 2**32]}, r"whole numbers from 0, below 2\^32"),
    ({"seeds": ["a", "b"]}, r"seeds=\['a', 'b'\] has the wrong type: it must be a list, each entry a whole"),
    ({"more_seeds": {"linear": [1]}}, r"seeds=\[0, 1, 1\] must be different whole numbers"),
    ({"more_seeds": {"linaer": [7]}}, "more_seeds='linaer' is unknown"),
    ({"more_seeds": {"linear": ["3"]}}, "more_seeds=.* wrong type: .* each value a list, each entry a whole number"),
    ({"minutes": 3}, "tokens=1000 and minutes=3: give one of them"),
    ({"tokens": 0}, "tokens=0 must be a finite number above 0"),
    ({"tokens": None, "minutes": float("inf")}, "minutes=inf must be a finite number"),
    ({"tokens": 10}, "variant 'linear': tokens=10 is less than one step has, 64"),
    ({"tokens": "1e6"}, r"tokens='1e6' has the wrong type: .* a whole number, or None. \(It is text, as YAML"),
    ({"validations": 2.5}, r"validations=2.5 has the wrong type: it must be a whole number\."),
    ({"validation_tokens": 10**9}, "validation_tokens=1000000000 must be less than the "),
    ({"evaluate": {"tokens": 1e5}}, r"evaluate.tokens=100000.0 has the wrong type: it must be a whole number\."),
    ({"evaluate": {"contexts": [300], "tokens": 3000}}, "300 must be a multiple of 8"),
    ({"evaluate": {"contexts": [400], "tokens": 4000}}, "400 is above 256 and must be a multiple of it"),
    ({"evaluate": {"contexts": [100], "tokens": 1000, "rows": 3}}, "'evaluate.rows' is not an option of Eval"),
    ({"evaluate": {"contexts": [512], "tokens": 1000}}, "multiple of 8 that divides evaluate.tokens=1000"),
    ({"evaluate": {"contexts": [32], "tokens": 32 * 10**6}}, "evaluate.tokens=32000000 must be less than the "),
    ({"model": {"window": 20.5}}, r"model.window=20.5 has the wrong type: it must be a whole number, or None\."),
    ({"model": {"forget_gate": "yes"}}, r"model.forget_gate='yes' has the wrong type: it must be True or False"),
    ({"model": {"rope": {"placement": "signd"}}}, "model.rope.placement='signd' is unknown: .* you mean"),
    ({"model": {"rope": {"bas": 5}}}, "'model.rope.bas' is not an option of RotaryConfig. Did you mean 'base'"),
    ({"optimizer": {"lr": "1e-2"}}, r"optimizer.lr='1e-2' has the wrong type: it must be a number\."),
    ({"optimizer": {"betas": 0.9}}, "optimizer.betas=0.9 has the wrong type: it must be a list"),
    ({"data": {"path": 5}}, "data.path=5 has the wrong type: it must be a string, or None"),
    ({"data": {"fractions": 0.9}}, "data.fractions=0.9 has the wrong type: it must be a list"),
    ({"task": "mqar", "data": {}, "tokens": 10**5}, "model.vocab_size=257 is too small for the rows, .* below 8192"),
    ({"variants": {}}, "variants: the grid has none"),
    ({"variants": {"linear": {}, "a/b": {}}}, "'a/b' names files too"),
    ({"variants": {"linear": {}, 5: {}}}, "variants: 5 names files too: .* quotes"),
    ({"variants": {"linear": {}, "x" * 101: {}}}, "names files too: use up to 100"),
    (with_x({"model.feature_mpa": "exp"}), "variant 'x': 'feature_mpa' is not an opt"),
    (with_x({"modle.rope": 1}), "variant 'x': 'modle.rope' must begin with one of"),
    (with_x({"model.rope.rotary_dim": 7}), "variant 'x': rotary_dim=7"),
    (with_x({"model.feature_map": "elu"}), "variant 'x': feature_map='elu' is unknown"),
    (with_x({"model.rope": "numerator"}), "variant 'x': model.rope='numerator' has the wrong type"),
    (with_x(["model.rope"]), r"variant 'x': \['model.rope'\] is no set of options"),
    (with_x({"model.d_model": 64}), "no width of the MLPs makes them equal"),
    (with_x({"model.vocab_size": 2**62}), "variant 'x': .*overflow"),
    (with_x({"model.vocab_size": 100}), "model.vocab_size=100 must be 257 or more"),
    (with_x({"optimizer.lr": -1.0}), "variant 'x': optimizer.lr=-1.0"),
    (with_x({"optimizer.lr": "1e-2"}), "variant 'x': optimizer.lr='1e-2' has the wrong type"),
    (with_x({"data.contxt": 1}), "variant 'x': 'contxt' is no option of data"),
    (with_x({"data.seed": 3}), "variant 'x': data.seed=3: a run's data follow from"),
    (with_x({"data.val_path": "v.txt"}), "variant 'x': data.val_path is not for grids, which cut the validation text"),
    (with_x({"data.context": "16"}), "variant 'x': data.context='16' has the wrong type"),
    (with_x({"data.context": 10**9}, tokens=10**10), "variant 'x': data.context=1000000000 must be less"),
    (with_x({"data.context": 24}), "variant 'linear': data.context=16 does not divide the grid's longest, 24"),
    (with_x({"data.batch_size": 2.5}), "data.batch_size=2.5 has the wrong type"),
    (with_x({"data.contiguous": "no"}), "data.contiguous='no' has the wrong type: .* without quotes"),
    (with_x({"data.contiguous": True, "model.attention": "softmax"}), "'x': data.contiguous=True needs a state of"),
    (with_x({"model.rope.trainable": True}, data=CONTIGUOUS), "variant 'x': data.contiguous=True detaches the state"),
    (with_stage(985, 16), "data.curriculum takes 16 steps, tokens=1000 in 8 parts of equal length 8: lower"),
    (with_stage(1, 10**9, tokens=10**11), "data.curriculum has rows of 1000000000 tokens, and the text to train on"),
    (with_stage(64, 16, tokens=None, minutes=1), "variant 'x': data.curriculum has steps of different speeds"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_are_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        settings_of(grid_of(tmp_path, **changes))


def test_tokens_that_are_no_bytes_are_refused(tmp_path):
    """A grid measures bits per byte of text; one byte a token is what it counts."""
    np.zeros(300_000, dtype="<u2").tofile(tmp_path / "flat.bin")
    with pytest.raises(InputError, match=r"data\.path='.*flat\.bin' holds tokens that are not bytes"):
        settings_of(grid_of(tmp_path, variants={"linear": {"data.path": str(tmp_path / "flat.bin")}, "softmax": {}}))


def test_the_text_is_checked_as_it_is_split(tmp_path):
    """By its name c.txt is for training and h.txt, which is too short, for validation; by position half of c.txt is."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, size in (("c.txt", 9000), ("h.txt", 100)):
        (folder / name).write_text("x" * size)
    data = {**SMALL["data"], "path": str(folder), "fractions": [0.5, 0.5, 0.0]}
    settings_of(grid_of(tmp_path, validation_tokens=200, data={**data, "split": "position"}))
    with pytest.raises(InputError, match="validation_tokens=200 must be less than the 101 tokens for validation"):
        settings_of(grid_of(tmp_path, validation_tokens=200, data={**data, "split": "document"}))


NO_YAML = [
    (None, "cannot be read .* benchmarks/grids has .*placement"),
    (b"a: [1", "is no YAML"),
    (b"variants: {a: {}, a: {model.rope: null}}", "is no YAML: .*'a' is there twice"),
    (b"title: 2026-13-45", "is no YAML: month must be in"),
    (b"title: \xff", "is no YAML: 'utf-8' codec"),
    (b"title: [" * 2000, "is no YAML"),
]


@pytest.mark.parametrize(("text", "message"), NO_YAML)
def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "grid.yaml").write_bytes(text)
    with pytest.raises(InputError, match=message):
        read_grid(tmp_path / "grid.yaml")
