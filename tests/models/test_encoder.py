"""The encoder: bidirectional, indifferent to padding, with heads, saved and loaded, started from another one."""

import pytest
import torch

from linrope import (
    CosineAttention,
    EncoderConfig,
    LanguageModel,
    LanguageModelConfig,
    MaskedLM,
    RoFormerEncoder,
    RotaryConfig,
    SequenceClassifier,
)
from tests.conftest import assert_input_errors

SMALL = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 3, "d_ff": 37, "dropout": 0.0}
KINDS = pytest.mark.parametrize("attention", ["linear", "softmax"])


def model_of(**options):
    torch.manual_seed(0)
    model = EncoderConfig(**{**SMALL, **options}).build().double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@KINDS
def test_each_token_sees_both_sides_and_no_padding(attention):
    model, tokens = model_of(attention=attention, rotate_values=True), torch.randint(31, (2, 11))
    y = model(tokens)
    assert y.shape == (2, 11, 24)
    for changed in (0, 10):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 31
        assert ((model(other) - y).abs().amax(-1) > 1e-6).all()
    padded = torch.cat((tokens, torch.randint(31, (2, 5))), dim=1)
    mask = torch.arange(16) < torch.tensor([[11], [11]])
    torch.testing.assert_close(model(padded, mask)[:, :11], y)


@KINDS
def test_only_differences_of_positions_count(attention):
    model, tokens = model_of(attention=attention), torch.randint(31, (1, 7))
    padded = torch.cat((torch.zeros(1, 9, dtype=torch.int64), tokens), dim=1)
    mask = torch.arange(16)[None] >= 9
    torch.testing.assert_close(model(padded, mask)[:, 9:], model(tokens))


@KINDS
def test_a_row_of_padding_alone_gives_finite_outputs_and_gradients(attention):
    model, tokens = model_of(attention=attention), torch.randint(31, (2, 5))
    mask = torch.tensor([[False] * 5, [True] * 5])
    seen = []
    model.blocks[0].attention.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    y = model(tokens, mask)
    y.sum().backward()
    assert torch.equal(seen[0][0], torch.zeros_like(seen[0][0]))
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("head", [None, "masked_lm", "classification", "question_answering", "multiple_choice"])
@pytest.mark.parametrize("options", [{}, {"attention": "softmax", "embedding_size": 10, "tie_embeddings": False}])
def test_a_model_is_initialised_anew_as_its_constructor_does(head, options):
    config = EncoderConfig(**SMALL, head=head, **options)
    torch.manual_seed(0)
    expected, drawn = config.build().state_dict(), torch.rand(1)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.rand(1).equal(drawn)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("masked_lm", (2, 9, 31)),
        ("classification", (2, 4)),
        ("token_classification", (2, 9, 4)),
        ("question_answering", (2, 9, 2)),
        ("multiple_choice", (2, 3)),
    ],
)
def test_every_head_is_saved_and_loaded(head, shape, tmp_path):
    model = EncoderConfig(**SMALL, head=head, n_labels=4, embedding_size=10).build().eval()
    tokens = torch.randint(31, (2, 3, 9) if head == "multiple_choice" else (2, 9))
    y = model(tokens)
    assert y.shape == shape
    y.square().sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == ["encoder.token_types.weight"] * ("token_types" in str(unused))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens), y)


def test_the_loss_of_masked_tokens_is_their_cross_entropy():
    model, tokens = model_of(head="masked_lm"), torch.randint(31, (2, 9))
    targets = torch.where(torch.rand(2, 9) < 0.4, torch.randint(31, (2, 9)), -100)
    logits = model(tokens).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, targets=targets), expected)
    nothing = model(tokens, targets=torch.full((2, 9), -100))
    nothing.backward()
    assert nothing == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_the_untied_output_layer_is_called(autocast):
    """Hooks and adapters around it act."""
    model, tokens = model_of(head="masked_lm", tie_embeddings=False).float(), torch.randint(31, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits, dtype = model(tokens), torch.bfloat16 if autocast else torch.float32
        model.output.register_forward_hook(lambda layer, inputs, output: 0 * output)
        bias = model(tokens)
    assert torch.equal(bias, model.bias.to(dtype).expand(2, 9, 31))
    assert logits.dtype == dtype
    assert not torch.equal(logits, bias)


def test_an_encoder_starts_from_another_one(tmp_path):
    trained = model_of(attention="softmax", head="masked_lm")
    trained.save_pretrained(tmp_path / "trained")
    other_head = r"trained' holds a MaskedLM, not a SequenceClassifier: call MaskedLM\.from_pretrained"
    assert_input_errors((lambda: SequenceClassifier.from_pretrained(tmp_path / "trained"), other_head))
    linear = model_of(attention="linear", head="masked_lm")
    notes = linear.float().start_from(tmp_path / "trained")
    assert notes == ["model.attention: 'softmax' in the checkpoint, 'linear' here"]
    torch.testing.assert_close(linear.state_dict(), trained.float().state_dict())
    classifier = model_of(attention="softmax", head="classification").float()
    head = classifier.output.weight.clone()
    assert classifier.start_from(tmp_path / "trained") == ["model.head: 'classification' is new"]
    torch.testing.assert_close(classifier.encoder.state_dict(), trained.encoder.state_dict())
    assert torch.equal(classifier.output.weight, head)
    model_of(attention="softmax", head="masked_lm", tie_embeddings=False).save_pretrained(tmp_path / "untied")
    tied = model_of(attention="softmax", head="masked_lm")
    assert "model.head: 'masked_lm' is new" in tied.start_from(tmp_path / "untied")
    assert_input_errors(
        (lambda: model_of(n_layers=1).start_from(tmp_path / "trained"), "model.n_layers: 2 in the checkpoint, 1 here"),
        (lambda: model_of(n_heads=2).start_from(tmp_path / "trained"), "model.n_heads: 3 in the checkpoint, 2 here"),
    )
    other = model_of(attention="softmax", head="masked_lm", rope=RotaryConfig(base=500.0), activation="relu")
    assert other.start_from(tmp_path / "trained") == [
        "model.activation: 'gelu' in the checkpoint, 'relu' here",
        "model.rope.base: 10000.0 in the checkpoint, 500.0 here",
    ]


def test_what_does_not_fit_is_named():
    model, tokens = model_of(), torch.randint(31, (2, 9))
    assert isinstance(model, RoFormerEncoder)
    choice, classifier = model_of(head="multiple_choice"), model_of(head="classification")
    choices = tokens[:, None]
    assert_input_errors(
        (lambda: EncoderConfig(d_model=24, n_heads=5).build(), "n_heads=5 does not divide d_model=24"),
        (lambda: EncoderConfig(activation="mish"), "activation='mish' is unknown"),
        (lambda: EncoderConfig(head="nothing"), "head"),
        (lambda: EncoderConfig(n_labels=0), "n_labels=0 must be at least 1"),
        (lambda: EncoderConfig(d_model=30, n_heads=6, rope=None, rotate_values=True).build(), "rope is None: set"),
        (lambda: CosineAttention(16, 2, rotate_values=True), "rope is one of 9 features: set rope, and no feature map"),
        (lambda: EncoderConfig(d_model=15, n_heads=3).build(), "odd|even"),
        (lambda: model(tokens[0]), r"tokens is \(9,\)"),
        (lambda: model(tokens + 31), r"tokens lie in \[.* 0 … 30"),
        (lambda: model(tokens, token_types=tokens + 2), "token_types lie in"),
        (lambda: model(tokens, torch.ones(2, 9)), "key_mask is .* pass booleans"),
        (lambda: model_of(head="masked_lm")(tokens, targets=tokens[:, 1:]), r"targets is \(2, 8\)"),
        (lambda: model_of(head="masked_lm")(tokens, targets=tokens - 99), r"targets has -\d+, vocab_size is 31"),
        (lambda: choice(tokens), r"pass \(B, C, T\)"),
        (lambda: choice([[[1]]]), r"tokens is a list: pass \(B, C, T\)"),
        (lambda: choice(tokens[:, None][:, :0]), r"tokens is \(2, 0, 9\): pass \(B, C, T\)"),
        (lambda: choice(choices, tokens > 0), r"key_mask is \(2, 9\) .* \(B, C, T\) = \(2, 1, 9\)"),
        (lambda: choice(choices, token_types=tokens), r"token_types is \(2, 9\) .* \(B, C, T\) = \(2, 1, 9\)"),
        (lambda: choice(choices, choices[..., 1:] > 0), r"key_mask is \(2, 1, 8\) .* \(B, C, T\) = \(2, 1, 9\)"),
        (lambda: classifier([[1]]), "tokens is a list: pass int64"),
        (lambda: classifier(tokens[:, :0]), r"tokens is \(2, 0\): the classes of a row"),
        (lambda: model.take(LanguageModel(LanguageModelConfig(d_model=8)), "it"), "it holds a LanguageModel: an enc"),
        (lambda: MaskedLM.from_pretrained("nowhere"), "nowhere"),
    )
    assert isinstance(classifier, SequenceClassifier)
