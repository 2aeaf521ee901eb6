"""Arguments of transformers: hidden states, embeddings, packed rows, checkpointing, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorWithFlattening, DynamicCache

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.interop.transformers import CACHE, LinropeConfig, LinropeForCausalLM
from linrope.positions.base import PositionsConfig
from tests.conftest import assert_input_errors

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""float32 products of other shapes."""
CONFIG = LanguageModelConfig(
    vocab_size=40,
    d_model=16,
    n_layers=3,
    n_heads=2,
    attention=["linear", "softmax"],
    positions=PositionsConfig("sinusoidal"),
    short_conv=4,
    forget_gate=True,
)


@pytest.fixture(scope="module")
def model() -> LinropeForCausalLM:
    torch.manual_seed(0)
    return LinropeForCausalLM.of(LanguageModel(CONFIG).eval())


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (2, 21), generator=torch.Generator().manual_seed(0))


def test_hidden_states_are_those_of_each_block_and_of_the_output_layer(model, tokens):
    out = model(tokens, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 21, 16)] * 4
    ours = model.model
    assert torch.equal(ours.output(out.hidden_states[-1]), out.logits)
    embedded = ours.embedding(tokens)
    embedded = embedded + ours.positions.embed(torch.arange(21)).float()
    assert torch.equal(out.hidden_states[0], embedded)
    assert torch.equal(out.hidden_states[1], ours.blocks[0](embedded, None, None)[0])
    assert torch.equal(ours.norm(ours.blocks[2](out.hidden_states[2], None, None)[0]), out.hidden_states[3])
    few = model(tokens, output_hidden_states=True, logits_to_keep=2)
    assert few.hidden_states[-1].shape == (2, 21, 16)
    torch.testing.assert_close(few.logits, out.logits[:, -2:], **CLOSE)
    assert model(tokens).hidden_states is None
    written = model.generate(
        tokens, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True
    )
    assert [len(step) for step in written.hidden_states] == [4, 4, 4]


def test_a_tuple_is_returned_when_asked(model, tokens):
    out = model(tokens, labels=tokens, return_dict=False)
    assert type(out) is tuple
    assert torch.equal(out[0], model(tokens, labels=tokens).loss)
    assert torch.equal(out[1], model(tokens).logits)
    assert len(model(tokens, return_dict=False, use_cache=False)) == 1


def test_embeddings_stand_for_tokens(model, tokens):
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens).logits)
    cache = model(inputs_embeds=embedded[:, :9])[CACHE]
    after = model(inputs_embeds=embedded[:, 9:], cache=cache).logits
    torch.testing.assert_close(after, model(tokens).logits[:, 9:], **CLOSE)
    options = {"max_new_tokens": 4, "do_sample": False}
    written = model.generate(inputs_embeds=embedded, **options)
    assert torch.equal(written, model.generate(tokens, **options)[:, 21:])


def test_logits_of_chosen_tokens(model, tokens):
    kept = torch.tensor([3, 0, 20])
    assert torch.equal(model(tokens, logits_to_keep=kept).logits, model(tokens).logits[:, kept])
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, model(tokens).logits[:, -1:], **CLOSE)


@pytest.mark.parametrize("seq_idx", [False, True])
def test_packed_rows_are_read_document_by_document(model, seq_idx):
    """Positions begin again with each document, in the sinusoids too."""
    texts = [torch.randint(0, 40, (n,)) for n in (7, 1, 12)]
    collate = DataCollatorWithFlattening(return_tensors="pt", return_position_ids=not seq_idx, return_seq_idx=seq_idx)
    batch = collate([{"input_ids": text.tolist()} for text in texts])
    out = model(**batch)
    alone = [model(text[None]).logits for text in texts]
    torch.testing.assert_close(out.logits, torch.cat(alone, dim=1), **CLOSE)
    nats = sum(F.cross_entropy(one[0, :-1], text[1:], reduction="sum") for one, text in zip(alone, texts))
    torch.testing.assert_close(out.loss, nats / (6 + 0 + 11), **CLOSE)


def test_packed_rows_may_be_padded(model):
    first, second = torch.randint(0, 40, (2, 5))
    row = torch.cat((first, second, torch.zeros(3, dtype=torch.int64)))[None]
    mask = F.pad(torch.ones(1, 10, dtype=torch.int64), (0, 3))
    positions = torch.tensor([[*range(5), *range(5), 1, 1, 1]])
    logits = model(row, attention_mask=mask, position_ids=positions).logits
    for part, text in ((logits[:, :5], first), (logits[:, 5:10], second)):
        torch.testing.assert_close(part, model(text[None]).logits, **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients_and_runs_blocks_twice(reentrant, tokens):
    torch.manual_seed(0)
    model = LinropeForCausalLM.of(LanguageModel(CONFIG)).train()
    calls = []
    model.model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(), plain)
    assert len(calls) == 1 + 2
    with pytest.raises(InputError, match="use_cache=True does not go with gradient checkpointing"):
        model(tokens, use_cache=True)
    assert model.eval()(tokens)[CACHE] is not None


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_can_be_resized(tied, tokens, tmp_path):
    torch.manual_seed(0)
    ours = LanguageModel(LanguageModelConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2, tie_embeddings=tied))
    model = LinropeForCausalLM.of(ours.eval())
    before = model(tokens).logits
    for size, options in ((50, {}), (60, {"mean_resizing": False}), (45, {})):
        model.resize_token_embeddings(size, **options)
        assert model.config.vocab_size == model.model.config.vocab_size == size
        assert (model.model.output.weight is model.model.embedding.weight) == tied
        assert model.model.embedding.weight.std() < 0.04  # 0.02 at the start
        logits = model(tokens).logits
        assert logits.shape == (2, 21, size)
        torch.testing.assert_close(logits[..., :40], before, **CLOSE)
    model.save_pretrained(tmp_path)
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(tokens), model(tokens).logits)
    assert torch.equal(LinropeForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)


def test_unsupported_arguments_are_refused(model, tokens):
    cache = model(tokens)[CACHE]
    n = tokens.shape[1]
    mask = torch.ones(2, 2 * n, dtype=torch.int64)
    mask[0, -1] = 0
    positions = torch.arange(n)[None]
    embedded, one = torch.zeros(2, n, 16), {"max_new_tokens": 1}
    other = LinropeForCausalLM(LinropeConfig(linrope=LanguageModelConfig(vocab_size=40, n_layers=2).to_dict()))
    assert_input_errors(
        (lambda: model(tokens, inputs_embeds=embedded), "pass either input_ids or inputs_embeds"),
        (lambda: model(), "pass either input_ids or inputs_embeds"),
        (lambda: model(inputs_embeds=embedded[..., 1:]), r"inputs_embeds is \(2, 21, 15\): pass \(B, T, d_model=16\)"),
        (lambda: model(tokens, attention_mask=mask[:, :3]), r"attention_mask is \(2, 3\)"),
        (lambda: model(tokens, attention_mask=mask, cache=cache), "hides tokens after those of the cache"),
        (lambda: model(tokens, position_ids=2 * positions), "position_ids jump to a position other than 0"),
        (lambda: model(tokens, position_ids=positions[:, :3]), r"position_ids is \(1, 3\) for tokens \(2, 21\)"),
        (lambda: model(tokens, position_ids=positions, cache=cache), "begin at 0 after 21 tokens"),
        (lambda: model(tokens, position_ids=positions + n + 1, cache=cache), "begin at 22 after 21 tokens"),
        (lambda: model(tokens, position_ids=positions + 7), "begin at 7 after 0 tokens"),
        (lambda: LinropeConfig(d_model=32), r"d_model=32 is a field of the model: pass linrope=\{'d_model': 32\}"),
        (lambda: LinropeConfig(hidden_size=32), r"hidden_size=32 .* pass linrope=\{'d_model': 32\}"),
        (lambda: model(tokens, cu_seq_lens_q=torch.tensor([0, 3, 42])), "cu_seq_lens_q alone is not read"),
        (lambda: model(tokens, output_attentions=True), "output_attentions=True: linrope never has"),
        (lambda: model(tokens, past_key_values=DynamicCache()), f"{CACHE} is a DynamicCache: pass the cache"),
        (lambda: model(tokens, cache=cache, past_key_values=cache), "two names of one argument"),
        (lambda: model.generate(tokens, **{CACHE: DynamicCache()}, **one), f"{CACHE} is a DynamicCache"),
        (lambda: model(tokens, cache=other(tokens, use_cache=True)[CACHE]), "state holds"),
        (lambda: model(tokens, logits_to_keep=-1), "logits_to_keep=-1 must be at least 1"),
        (lambda: model(tokens, labels=tokens, logits_to_keep=2), "labels need the logits of all tokens"),
        (lambda: model.generate(tokens, prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens drafts tokens"),
        (lambda: model.generate(tokens, assistant_model=other), "assistant_model drafts tokens"),
        (lambda: cache.crop(3), "cannot drop its last tokens"),
    )
