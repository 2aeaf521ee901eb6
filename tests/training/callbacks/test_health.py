"""The health of attention against the operator's definition, spikes with their samples, and what it costs."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig, linear_attention
from linrope.cli.main import main
from linrope.profiling.attention_health import LayerHealth
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.training import LanguageModelingModule, ResumableDataModule, TextDataModule
from linrope.training.callbacks.health import SpikeWarning
from tests.training.attached import attached, record_batches
from tests.training.test_resume import losses, version


def seen_by(model: LanguageModel, tokens: torch.Tensor, **options) -> list[OperatorCall]:
    found = []
    with torch.no_grad(), operator_hook(model, found.append):
        model(tokens, **options)
    return found


def health_of(*calls: OperatorCall) -> dict[str, float]:
    health = LayerHealth()
    for seen in calls:
        health.add(seen)
    return {name: value.item() for name, value in health.values().items()}


def small(**options) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, forget_gate=True, **options)).eval()
    for block in model.blocks:  # gates that differ from token to token, and weights of either sign
        block.attention.qkv.weight.data.mul_(8)
        torch.nn.init.normal_(block.attention.forget.linear.weight)
        torch.nn.init.constant_(block.attention.forget.linear.bias, 2.0)
    return model


def by_definition(seen: OperatorCall) -> dict[str, float]:
    """All denominators and all signs of the first row, from the operator and from all pairs."""
    rope, log_decay = seen.options["rope"], seen.options["log_decay"][:1]
    signed = 0 if rope is None else rope.signed_dim
    q, k = seen.q[:1], seen.k[:1]
    ids, state = seen.options["segment_ids"], seen.options["state"]
    if state is not None:
        k_sum = state.k_sum[:1, :, signed:]
        state = type(state)(k_sum[..., None], k_sum, state.length)
    ones, more = torch.ones_like(q[..., :1]), {"segment_ids": None if ids is None else ids[:1], "state": state}
    denominator = linear_attention(
        q[..., signed:], k[..., signed:], ones, log_decay=log_decay, normalize="none", **more
    )

    def phi(x):
        return torch.cat((x[..., :signed], torch.nn.functional.elu(x[..., signed:]) + 1), dim=-1)

    weights = (rope.rotate(phi(q)) @ rope.rotate(phi(k)).mT)[0]
    visible = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
    if ids is not None:
        visible &= ids[0][:, None] == ids[0][None, :]
    return {
        "smallest_denominator": denominator.min().item(),
        "negative_weights": (weights < 0)[:, visible].float().mean().item(),
        "output": seen.o[0].abs().mean().item(),
        "state_norm": seen.final.kv[0].norm().item(),
        **{f"reach/head{h}": -1 / log_decay[0, h].mean().item() for h in range(2)},
    }


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_what_is_seen_of_a_short_row_is_the_operators_own(signed, documents):
    """Sixteen tokens: every query and key is looked at."""
    model = small(rope=RotaryConfig(placement="signed" if signed else "numerator"))
    tokens = torch.randint(257, (2, 16))
    ids = (torch.arange(16) // 7).expand(2, -1) if documents else None
    for seen in seen_by(model, tokens, segment_ids=ids):
        found = health_of(seen)
        assert found == pytest.approx(by_definition(seen), rel=1e-4)  # float32 sums in another order
    assert found["negative_weights"] > 0 or not signed


def test_the_past_counts_in_denominators_and_segments_are_one_row():
    model, tokens = small(), torch.randint(257, (1, 32))
    whole, first = (seen_by(model, part)[0] for part in (tokens, tokens[:, :16]))
    _, state = model(tokens[:, :16], return_state=True)
    second = seen_by(model, tokens[:, 16:], state=state)[0]
    smallest = by_definition(second)["smallest_denominator"]
    assert health_of(second)["smallest_denominator"] == pytest.approx(smallest, rel=1e-4)
    in_segments = health_of(second, first)  # the way back through segments comes in this order
    for name, value in health_of(whole).items():
        if name in ("output", "state_norm") or name.startswith("reach"):
            assert in_segments[name] == pytest.approx(value, rel=1e-4)


def test_watching_changes_nothing_and_ends():
    model, tokens = small(), torch.randint(257, (1, 20))
    before = model(tokens)
    with operator_hook(model, lambda seen: LayerHealth().add(seen)):
        assert torch.equal(model(tokens), before)
    assert all(block.attention.watch is None for block in model.blocks)
    mixed = LanguageModel(LanguageModelConfig(d_model=16, n_layers=3, attention=["softmax", "linear", "softmax"]))
    assert [seen.layer for seen in seen_by(mixed, tokens)] == [1]


def test_a_run_logs_health_every_n_steps(tiny, run_folder):
    options = ["--trainer.max_steps=7", "--run.health_every_n_steps=3", "--model.forget_gate=true"]
    options += ["--trainer.accumulate_grad_batches=2", "--segment_length=16"]
    assert main(["fit", *tiny, *options]) == 0
    names = "smallest_denominator negative_weights share_of_time output/layer0 state_norm/layer0 "
    names += "reach/layer0/head0 reach/layer0/head1"
    logged = {name: losses(run_folder, f"health/{name}") for name in names.split()}
    header = (run_folder / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert {name for name in header if name.startswith("health/")} == {f"health/{name}" for name in logged}
    assert all(list(by_step) == [3, 6] for by_step in logged.values())
    for step in (3, 6):
        assert 0 <= float(logged["negative_weights"][step]) <= 1
        assert float(logged["smallest_denominator"][step]) > 0
        # a gate starts at log_decay = logsigmoid(4)
        assert float(logged["reach/layer0/head0"][step]) == pytest.approx(math.log1p(math.exp(-4)) ** -1, rel=0.05)


def test_none_is_logged_where_it_is_off_or_no_layer_is_linear(tiny, run_folder, error_of):
    assert main(["fit", *tiny, "--run.health_every_n_steps=0"]) == 0
    assert main(["fit", *tiny, "--run.health_every_n_steps=1", "--model.attention=softmax"]) == 0
    assert not losses(run_folder, "health/share_of_time")
    assert not losses(version(run_folder, 1), "health/share_of_time")
    for option, said in {
        "health_every_n_steps=-1": "run.health_every_n_steps=-1 must be 0 (never) or more",
        "spike_factor=1": "run.spike_factor=1.0 must be above 1, or 0",
        "spike_factor=.nan": "run.spike_factor=nan must be above 1",
    }.items():
        assert said in error_of("fit", *tiny, f"--run.{option}")


def told(values: list[float], factor: float = 3.0, accumulate: int = 1) -> tuple[str, SpikeWarning]:
    console = Console(file=None, record=True, width=200)
    warning = SpikeWarning(console, factor, window=8)
    data = ResumableDataModule()
    data.samples_of = lambda step: f"samples of {step}"
    trainer = SimpleNamespace(
        accumulate_grad_batches=accumulate, is_global_zero=True, datamodule=data, overfit_batches=0
    )
    with console.capture() as captured:
        for number, value in enumerate(values):
            trainer.global_step = (number + 1) // accumulate
            trainer.callback_metrics = {"train_loss": torch.tensor(1.0), "grad_norm": torch.tensor(value)}
            warning.on_train_batch_end(trainer, None, None, None, number)
    return captured.get(), warning


def test_a_spike_is_named_with_its_step_and_samples():
    text, warning = told([1.0, 1.0, 1.0, 3.1, 2.9, 1.0])
    assert text.strip() == "spike at step 4: grad_norm 3.1 is 3.1 times its median; samples of 3"
    assert [(step, what) for step, what, *_ in warning.found] == [(4, "grad_norm")]


def test_no_spike_without_a_median_and_micro_batches_are_one_step():
    assert told([1.0, 9.0])[0] == ""  # two steps are a quarter of the window, one is not
    text, _ = told([1.0, 1.0, 1.0, 1.0, 50.0, 50.0], accumulate=2)
    assert text.count("spike at step 3") == 1
    assert told([0.0, 0.0, 0.0, 1.0])[0] == ""  # of targets that are known by heart


def test_a_real_spike_names_the_very_samples(tiny, run_folder, capsys, monkeypatch):
    batches = record_batches(monkeypatch)
    clip = LanguageModelingModule.configure_gradient_clipping

    def blown_up(self, optimizer, *args, **options):
        if self.trainer.global_step == 30:
            for parameter in self.model.parameters():
                parameter.grad.mul_(100)
        clip(self, optimizer, *args, **options)

    monkeypatch.setattr(LanguageModelingModule, "configure_gradient_clipping", blown_up)
    assert main(["fit", *tiny, "--trainer.max_steps=32", "--trainer.val_check_interval=32"]) == 0
    said = r"spike at step 31: grad_norm .* times its median; samples (\d+) … (\d+) of length 32"
    line = re.search(said, capsys.readouterr().out)
    path = next(option.split("=")[1] for option in tiny if option.startswith("--data.path"))
    data: TextDataModule = attached(path)
    samples = [(32, i) for i in range(int(line[1]), int(line[2]) + 1)]
    assert torch.equal(data.train_dataloader().dataset[samples]["inputs"], batches[30]["inputs"])


def test_samples_are_named_by_stage_and_in_contiguous_rows(text_file):
    stages = [{"tokens": 128, "seq_len": 16}, {"tokens": 64, "seq_len": 32}]
    data = attached(text_file, curriculum=stages, accumulate=2)
    # steps of 2 batches of 64 tokens: one of 8 × 16, then rows of 32
    assert data.samples_of(0) == "samples 0 … 7 of length 16"
    assert data.samples_of(1) == "samples 0 … 3 of length 32"
    assert data.samples_of(2) == "samples 4 … 7 of length 32"
    assert attached(text_file, contiguous=True, accumulate=3).samples_of(2) == "batches 6 … 8 of the contiguous rows"


def test_the_share_of_time_is_logged_as_the_benchmark_reports_it(tmp_path, capsys):
    from benchmarks.speed import health

    args = ["--steps", "6", "--every", "3", "--context", "64", "--d_model", "16", "--layers", "1", "--heads", "2"]
    assert health.Health.main([*args, "--output", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "health.json").read_text())
    (point,) = contents["points"]
    assert 0 < point["share_of_time"] < 1
    assert point["looks"] == 2
    assert f"{100 * point['share_of_time']:.2f} %" in capsys.readouterr().out
