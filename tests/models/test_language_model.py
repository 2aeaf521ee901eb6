"""The language model: continuing, packing, saving, and its sampling."""

import copy
import dataclasses
import json
import math
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

from linrope import (
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    RotaryConfig,
    RotaryEmbedding,
    SoftmaxAttention,
)
from linrope.feature_maps import MAP_MODULES
from linrope.generation.sampling import Sampling, probabilities_of
from linrope.positions.base import PositionsConfig
from linrope.rotary import RotaryScaling
from tests.conftest import assert_input_errors, covering

SMALL = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 2}
HYBRID = {**SMALL, "attention": ["linear", "softmax"]}
CONFIGS = {
    "plain": LanguageModelConfig(**SMALL),
    "recipe": LanguageModelConfig(**SMALL, short_conv=4, forget_gate=True, output_gate=True),
    "softmax": LanguageModelConfig(**SMALL, attention="softmax", short_conv=4),
    "hybrid": LanguageModelConfig(**HYBRID, forget_gate=True, tie_embeddings=False),
    "other rope": LanguageModelConfig(**SMALL, rope=RotaryConfig(base=500.0, rotary_dim=4, interleaved=False)),
    "no rope": LanguageModelConfig(**SMALL, rope=None, feature_map="softmax", normalize="none"),
    "trainable rope": LanguageModelConfig(**SMALL, rope=RotaryConfig(base=[10.0, None], trainable=True)),
    "scaled rope": LanguageModelConfig(**HYBRID, rope=RotaryConfig(scaling=RotaryScaling("yarn", 2.0, 32))),
    "before map": LanguageModelConfig(**HYBRID, rope=RotaryConfig(placement="before_map")),
    "sinusoidal": LanguageModelConfig(**SMALL, positions=PositionsConfig("sinusoidal"), short_conv=4),
    "norm": LanguageModelConfig(**HYBRID, output_norm=True, temperature=True),
    "window": LanguageModelConfig(**SMALL, attention=["softmax", "linear"], window=9, rope_layers=[1]),
    **{name: LanguageModelConfig(**SMALL, feature_map=name) for name in MAP_MODULES},
}

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64


def awake(model: LanguageModel) -> LanguageModel:
    """The model with other weights where they are 0 at the start, which would hide what they do."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


FEW = ("recipe", "softmax", "hybrid", "no rope", "trainable rope", "scaled rope")
FEW += ("before map", "norm", "window", "hedgehog")


@pytest.fixture(params=covering(CONFIGS, FEW))
def model(request):
    torch.manual_seed(0)
    return awake(LanguageModel(CONFIGS[request.param])).double().eval()


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_read_apart_and_the_last_logits_alone_are_those_of_all(model, tokens, packed):
    """And the state goes on alike, whether the logits to keep begin in a document, at its start, or before it."""
    ids = (torch.arange(70) >= 60).long().expand(2, -1) if packed else None
    whole, state = model(tokens, segment_ids=ids, return_state=True)
    if packed:
        apart = torch.cat((model(tokens[:, :60]), model(tokens[:, 60:])), dim=1)
        torch.testing.assert_close(whole, apart, **EXACT)
    after = model(tokens[:, :5], state)
    for kept in (1, 10, 15, 99):
        logits, state = model(tokens, segment_ids=ids, return_state=True, logits_to_keep=kept)
        torch.testing.assert_close(logits, whole[:, -kept:], **EXACT)
        torch.testing.assert_close(model(tokens[:, :5], state), after, **EXACT)


def test_a_new_model_knows_nothing(model, tokens):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), torch.randint(0, 40, (140,)))
    assert abs(loss.item() - math.log(40)) < 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_memory_is_initialised_as_a_new_one(name):
    torch.manual_seed(0)
    expected, drawn = LanguageModel(CONFIGS[name]).state_dict(), torch.rand(1)
    with torch.device("meta"):
        model = LanguageModel(CONFIGS[name])
    for _ in range(2):  # from nothing, and once more
        model.to("meta").to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
        torch.manual_seed(0)
        model.reset_parameters()
        assert torch.equal(torch.rand(1), drawn)
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        assert (model.output.weight is model.embedding.weight) == CONFIGS[name].tie_embeddings


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["recipe", "trainable rope", "hedgehog", "taylor"])
def test_a_divided_model_without_memory_is_initialised_as_a_new_one(name):
    torch.manual_seed(0)
    expected = LanguageModel(CONFIGS[name]).state_dict()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = LanguageModel(CONFIGS[name])
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.reset_parameters()
        assert model.output.weight is model.embedding.weight
        assert all(torch.equal(x.full_tensor(), expected[name]) for name, x in model.state_dict().items())
    finally:
        torch.distributed.destroy_process_group()


def test_on_the_device_meta_a_model_computes_shapes_and_generates_nothing(model, tokens):
    model, tokens = model.to("meta"), tokens.to("meta")
    logits, state = model(tokens, return_state=True)
    assert (logits.shape, logits.device.type) == ((2, 70, 40), "meta")
    model(tokens[:, 1:], state, targets=tokens[:, :-1]).backward()
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    assert_input_errors((lambda: model.generate(tokens, 3), "device meta, where logits have no values"))


def test_targets_that_cannot_be_are_named(model, tokens):
    def loss(**changed):
        targets = tokens.clone().to(changed.get("dtype", torch.int64))
        targets[1, 3] = changed.get("one", -100)
        return lambda: model(tokens, targets=targets)

    assert loss()().isfinite()
    assert_input_errors(
        (loss(one=-1), r"targets has -1, vocab_size is 40: pass 0 … 39, or -100 where there is no target"),
        (loss(one=40), r"targets has 40, vocab_size is 40"),
        (loss(dtype=torch.int32), r"targets are torch.int32: pass int64"),
    )


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_into_a_model_without_memory_are_tied(assign, tokens):
    model = LanguageModel(CONFIGS["recipe"]).eval()
    other = LanguageModel(CONFIGS["recipe"]).eval().to("meta")
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), assign=assign)
    assert other.output.weight is other.embedding.weight
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(copy.deepcopy(pickle.loads(pickle.dumps(other)))(tokens), model(tokens))


def test_an_output_of_its_own_stays_one_when_weights_are_loaded(tokens):
    """Also in a model that would tie them by its configuration; one that ties them refuses two."""
    model, other = LanguageModel(CONFIGS["recipe"]).eval(), LanguageModel(CONFIGS["recipe"]).eval()
    for one in (model, other):
        one.output.weight = torch.nn.Parameter(torch.randn_like(one.embedding.weight))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))
    tied = LanguageModel(CONFIGS["recipe"])
    before = tied.embedding.weight.detach().clone()
    refused = r"output\.weight is not embedding\.weight, which it is in this model: build .* tie_embeddings=False"
    assert_input_errors(
        (lambda: tied.load_state_dict(model.state_dict()), refused),
        (lambda: tied.load_state_dict(model.state_dict(), assign=True), refused),
        (lambda: tied.load_weights(model.state_dict(), "one.ckpt"), rf"checkpoint 'one\.ckpt': .*: {refused}"),
    )
    assert torch.equal(tied.embedding.weight, before)


@pytest.mark.parametrize("layer", ["embedding", "output"])
@pytest.mark.parametrize("change", [partial(l1_unstructured, name="weight", amount=0.5), weight_norm])
def test_weights_of_a_pruned_or_parametrized_layer_are_loaded(layer, change, tokens):
    model = LanguageModel(CONFIGS["recipe"]).eval()
    change(getattr(model, layer))
    logits, weights = model(tokens), copy.deepcopy(model.state_dict())
    torch.nn.init.zeros_(model.norm.weight)
    model.load_state_dict(weights)
    assert torch.equal(model(tokens), logits)


def test_a_model_that_is_moved_stays_tied(tokens):
    """`torch.func.stack_module_state` is used so: the structure on meta, the weights of each model given."""
    model = LanguageModel(CONFIGS["recipe"]).eval()
    structure = copy.deepcopy(model).to("meta")
    assert structure.output.weight is structure.embedding.weight
    logits = torch.func.functional_call(structure, dict(model.named_parameters()), (tokens,))
    assert torch.equal(logits, model(tokens))
    structure.to_empty(device="cpu")
    assert structure.output.weight is structure.embedding.weight


def test_normed_heads_start_as_small_as_the_embeddings():
    """Heads of RMS 0.1 through W_o of deviation (3 · 64 · 2 · 4)^-½: 0.1 / √24 = 0.020, and embeddings have 0.02."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(d_model=64, n_layers=4, output_norm=True))
    added = torch.stack([block.attention(torch.randn(4, 50, 64)) for block in model.blocks])
    assert abs(added.std() / (0.1 / 24**0.5) - 1) < 0.1  # 4 W_o of 4,096 numbers: 1 % each; v's share of it is less
    assert abs(model.embedding.weight.std() / 0.02 - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_saving_and_loading_gives_the_same_model(model, dtype, tokens, tmp_path):
    model.to(dtype).save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["SHA256SUMS", "config.json", "model.pt"]
    loaded = LanguageModel.from_pretrained(tmp_path / "saved")
    assert loaded.config == model.config
    assert not loaded.training
    assert loaded.embedding.weight.dtype == dtype
    assert torch.equal(loaded(tokens), model(tokens))
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    assert type(LanguageModelConfig(d_model=np.int64(32)).to_dict()["d_model"]) is int
    assert LanguageModelConfig(attention=("linear",)).to_dict()["attention"] == ["linear"]


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    model = LanguageModel(CONFIGS["plain"])
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attention.qkv)
    (tmp_path / "file").touch()
    assert_input_errors(
        (
            partial(model.save_pretrained, tmp_path / "saved"),
            r"changed in blocks\.0\.attention\.qkv\.parametrizations.*, .*: remove parametrizations and merge adapters",
        ),
        (
            partial(LanguageModel(CONFIGS["plain"]).save_pretrained, tmp_path / "file"),
            "file' is a file: choose a folder",
        ),
    )
    assert not (tmp_path / "saved").exists()


def test_a_model_that_reads_values_as_it_is_built_is_saved_beside_other_files(tmp_path):
    class Stepped(LanguageModel):
        def __init__(self, config):
            super().__init__(config)
            self.steps = torch.linspace(0, 1, 3).tolist()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class SteppedConfig(LanguageModelConfig):
        def build(self):
            return Stepped(self)

    model = SteppedConfig(vocab_size=40, d_model=8, n_layers=1, n_heads=2).build()
    for name in ("model_ema.safetensors", "model-best.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.glob("model*")}
    assert names == {"model.pt", "model_ema.safetensors", "model-best.safetensors", "model-00001-of-00002.safetensors"}
    assert LanguageModel.from_pretrained(tmp_path).steps == [0, 0.5, 1]


def test_gradients_of_each_row_by_vmap():
    model, tokens = LanguageModel(CONFIGS["plain"]), torch.randint(40, (3, 20))
    weights = dict(model.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None],)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the definition is slow for long rows
        of_rows = torch.vmap(torch.func.grad(loss), (None, 0))(weights, tokens)
    expected = torch.autograd.grad(model(tokens).square().sum(), list(weights.values()))
    for found, exact in zip(of_rows.values(), expected):
        torch.testing.assert_close(found.sum(0), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("name", ["recipe", "hybrid"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_new_tensors_changes_nothing(name, default):
    """Compiled kernels write into buffers of the dtype that they expect."""
    model, tokens = LanguageModel(CONFIGS[name]), torch.randint(40, (2, 300))

    def results():
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    expected, before = results(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = results()
    finally:
        torch.set_default_dtype(before)
    for one, exact in zip(found, expected):
        torch.testing.assert_close(one, exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


def test_rows_that_are_packed_have_gradients_by_vmap_wherever_positions_are_read():
    x, ids = torch.randn(3, 20, 16), torch.zeros(3, 20, dtype=torch.int64)
    for layer in (LinearAttention(16, 2, rope=RotaryConfig(placement="before_map")), SoftmaxAttention(16, 2)):
        expected = torch.cat([layer(row[None], segment_ids=of_row[None]) for row, of_row in zip(x, ids)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the definition is slow for long rows
            found = torch.vmap(lambda row, of_row: layer(row[None], segment_ids=of_row[None])[0])(x, ids)  # noqa: B023
        torch.testing.assert_close(found, expected)
    rope, positions = RotaryEmbedding(16), torch.arange(60).view(3, 20)
    rotated = torch.vmap(lambda row, at: rope.rotate(row, positions=at))(x, positions)
    torch.testing.assert_close(rotated, rope.rotate(x[:, None], positions=positions)[:, 0])


def test_loading_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.ckpt")
    torch.save({"linrope": {}, "state_dict": {}}, tmp_path / "empty.ckpt")
    torch.save(LanguageModel(CONFIGS["plain"]), tmp_path / "pickled.ckpt")
    start = json.dumps(CONFIGS["plain"].to_dict())[:-1]
    for folder, config, message in [
        ("other", f'{start}, "d_model": 32}}', "do not fit its configuration"),
        ("misspelt", f'{start}, "d_modl": 32}}', "'d_modl' is not an option.*Did you mean 'd_model'"),
        ("rope", f'{start}, "rope": {{"bse": 3}}}}', "'bse' is not an option of RotaryConfig.*Did you mean 'base'"),
        ("words", f'{start}, "d_model": "wide"}}', "the wrong type"),
        ("list", "[1]", "holds no JSON object"),
        ("cut", "{", "is not valid JSON"),
        ("llama", '{"model_type": "llama"}', "llama' is a model of transformers.*`linrope convert`"),
        ("tensor", f"{start}}}", "do not fit its configuration"),
        ("bare", f"{start}}}", "bare' has no model.safetensors, .* or model.pt"),
    ]:
        LanguageModel(CONFIGS["plain"]).save_pretrained(tmp_path / folder)
        (tmp_path / folder / "SHA256SUMS").unlink()
        (tmp_path / folder / "config.json").write_text(config)
        if folder == "tensor":
            torch.save(torch.zeros(3), tmp_path / folder / "model.pt")
        elif folder == "bare":
            (tmp_path / folder / "model.pt").unlink()
        assert_input_errors((partial(LanguageModel.from_pretrained, tmp_path / folder), message))
    for file, message in [
        ("empty.ckpt", "not written by linrope"),
        ("foreign.ckpt", "not written by linrope"),
        ("nowhere", "does not exist"),
        ("text.ckpt", "damaged or no checkpoint"),
        ("pickled.ckpt", "cannot be read safely"),
        (".", "is a folder without config.json"),
    ]:
        assert_input_errors((partial(LanguageModel.from_pretrained, tmp_path / file), message))


def test_tied_embeddings_are_one_parameter():
    tied, untied = LanguageModel(CONFIGS["plain"]), LanguageModel(CONFIGS["hybrid"])
    assert tied.output.weight is tied.embedding.weight
    assert untied.output.weight is not untied.embedding.weight


def test_the_state_of_linear_layers_does_not_grow_and_a_window_bounds_the_cache():
    hybrid, window = (LanguageModel(CONFIGS[name]) for name in ("hybrid", "window"))
    assert hybrid.state_bytes(200) - hybrid.state_bytes(100) == 100 * 2 * 16 * 4  # keys and values of one layer
    assert window.state_bytes(8) == window.state_bytes(10**6)
    assert window.state_bytes(8) - window.state_bytes(7) == 2 * 16 * 4


def test_rope_rotates_the_chosen_layers():
    for layers, rotated in (([1], [False, True]), ([], [False, False]), (None, [True, True])):
        model = LanguageModel(LanguageModelConfig(**SMALL, rope_layers=layers))
        assert [block.attention.rope is not None for block in model.blocks] == rotated


def test_a_list_of_kinds_repeats_over_the_layers():
    pattern = ["linear", "linear", "softmax"]
    for n_layers, kinds in [(3, pattern), (6, 2 * pattern), (7, [*pattern, *pattern, "linear"])]:
        config = LanguageModelConfig(d_model=16, n_heads=2, n_layers=n_layers, attention=pattern)
        assert config.attention_types == kinds
        softmax = [isinstance(block.attention, SoftmaxAttention) for block in LanguageModel(config).blocks]
        assert softmax == [kind == "softmax" for kind in kinds]


def test_weights_of_gates_are_also_taken_by_their_names_without_linear(tokens, tmp_path):
    model = awake(LanguageModel(CONFIGS["recipe"])).eval()
    model.save_pretrained(tmp_path)
    names = {key: key.replace(".linear.", ".") for key in model.state_dict()}
    assert any(key != shorter for key, shorter in names.items())
    torch.save({shorter: model.state_dict()[key] for key, shorter in names.items()}, tmp_path / "model.pt")
    assert torch.equal(LanguageModel.from_pretrained(tmp_path, verify=False)(tokens), model(tokens))


class LowRank(torch.nn.Module):
    """A linear layer and a product of low rank, as adapters of other libraries add it: 0 at the start."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["recipe", "hybrid"])
def test_adapters_around_every_linear_layer_are_trained(name, tokens):
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS[name])
    plain = model(tokens)
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert len(linears) >= 9
    for path, layer in linears.items():
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, LowRank(layer))
    assert torch.equal(model(tokens), plain)
    adapted = [parameter for path, parameter in model.named_parameters() if ".up." in path or ".down." in path]
    optimizer, losses = torch.optim.Adam(adapted, lr=0.02), []
    for _ in range(10):
        losses.append(model(tokens[:, :-1], targets=tokens[:, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in adapted)
    assert losses[-1] < losses[0] - 10
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(tokens)).all()


def test_a_state_dict_has_these_names():
    """The names that checkpoints hold; no option adds one unless it is on."""
    attention = "qkv.weight conv.weight gate.weight out.weight forget.linear.weight forget.linear.bias"
    block = ["mlp.gate_up.weight", "mlp.out.weight", "attention_norm.weight", "mlp_norm.weight"]
    block += [f"attention.{name}" for name in attention.split()]
    expected = {f"blocks.{layer}.{name}" for layer in range(2) for name in block}
    expected |= {"embedding.weight", "norm.weight", "output.weight"}
    assert set(LanguageModel(CONFIGS["recipe"]).state_dict()) == expected


def test_sampling_follows_the_distribution_and_its_options(tokens):
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS["plain"]).eval()
    torch.nn.init.normal_(model.output.weight, std=0.3)  # a distribution with some shape, and no certainty
    prompt = tokens[:1].expand(4000, -1)[:, :5]
    probabilities = model(prompt[:1])[0, -1].softmax(-1)
    draw = model.generate(prompt, 1, seed=0)[:, -1]
    frequencies = draw.bincount(minlength=40) / 4000
    assert (frequencies - probabilities).abs().max() < 4 * (0.25 / 4000) ** 0.5  # four deviations of a frequency
    order = probabilities.argsort(descending=True)
    assert set(model.generate(prompt, 1, top_k=3, seed=0)[:, -1].tolist()) == set(order[:3].tolist())
    enough = int((probabilities[order].cumsum(0) < 0.5).sum()) + 1
    assert set(model.generate(prompt, 1, top_p=0.5, seed=0)[:, -1].tolist()) == set(order[:enough].tolist())
    assert (probabilities_of(torch.zeros(1, 5), Sampling(top_k=2)) > 0).sum() == 2  # ties do not count as one
    for cold in (0, 1e-40, 1e-300):
        assert (model.generate(prompt, 1, temperature=cold)[:, -1] == order[0]).all()


def test_generation_matches_reading_the_whole_text_each_time(model, tokens):
    expected = tokens
    for _ in range(8):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(tokens, 8, temperature=0), expected)
    assert torch.equal(model.generate(tokens, 0), tokens)


def test_bad_calls_are_named(tokens):
    model = LanguageModel(CONFIGS["plain"]).eval()
    _, state = model(tokens, return_state=True)
    assert_input_errors(
        (lambda: model(tokens[0]), r"tokens is \(70,\)"),
        (lambda: model(tokens.float()), "float32"),
        (lambda: model(tokens + 30), "vocab_size is 40"),
        (lambda: model([[1, 2]]), "tokens is a list"),
        (lambda: model(tokens, state[:1]), "state holds AttentionState: pass the tuple of 2"),
        (lambda: model(tokens, state[0]), "state holds AttentionState: pass"),
        (lambda: model(tokens, [layer.past for layer in state]), "state holds State, State"),
        (lambda: model(tokens, logits_to_keep=0), "logits_to_keep=0 must be a whole number, at least 1"),
        (lambda: model.generate(tokens, 2.5), "max_new_tokens=2.5 must be a whole number"),
        (lambda: model.generate(tokens, 3, top_k=2.5), "top_k=2.5 has the wrong type: .* a whole number, or None"),
        (lambda: LanguageModelConfig(attention="linaer"), "attention='linaer'.*Did you mean 'linear'"),
        (lambda: LanguageModelConfig(attention=["linear"] * 5), "must have 1 to n_layers=4 types"),
        (lambda: LanguageModelConfig(attention=[]), r"attention=\[\] must have 1 to n_layers=4 types"),
        (lambda: LanguageModelConfig(attention=["linear", "sofmax"]), "attention='sofmax'.*Did you mean 'softmax'"),
        (lambda: LanguageModelConfig(rope_layers=[0, 4]), r"rope_layers=\[0, 4\] must be in 0 … 3"),
        (lambda: LanguageModelConfig(feature_map="favour"), "feature_map='favour'.*Did you mean 'favor'"),
        (lambda: LanguageModelConfig.from_dict({"rope": 3}), "rope is a int"),
        (lambda: LanguageModelConfig(rope=RotaryConfig(placement="signd")), "rope.placement='signd' is unknown.*mean"),
        (lambda: LanguageModelConfig(rope=RotaryConfig(scaling={"rule": "ntk"})), "rope.scaling=.* the wrong type"),
        (lambda: LanguageModelConfig.from_dict({"rope": {"base": "1e5"}}), "rope.base='1e5' has .* write 1_000_000"),
        (lambda: LanguageModelConfig.from_dict({"rope_layers": 3}), "rope_layers=3 has the wrong type: .* a list,"),
        (lambda: LanguageModelConfig.from_dict({"n_heads": True}), "n_heads=True .*: it must be a whole number"),
        (lambda: LanguageModelConfig(attention=[1]), r"attention=\[1\] .* a string, or a list, each entry a string"),
        (lambda: LanguageModelConfig(dropout="0"), "dropout='0' .*: it must be a number"),
        (lambda: LanguageModelConfig(window=2.5), "window=2.5 .*: it must be a whole number, or None"),
        (lambda: LanguageModelConfig(tie_embeddings="no"), "tie_embeddings='no' .*: it must be True or False"),
        (lambda: LanguageModelConfig.from_dict({"n_layer": 3}), "'n_layer' is not an option.*'n_layers'"),
    )
    for make, options in [
        (LanguageModelConfig, {"d_model": 0, "dropout": 1.0, "d_ff": 0, "window": 0, "norm_eps": -1.0}),
        (partial(model.generate, tokens, 3), {"temperature": -1.0, "top_k": 0, "top_p": 1.5}),
    ]:
        assert_input_errors(*((partial(make, **{name: x}), f"{name}={x} must be") for name, x in options.items()))
