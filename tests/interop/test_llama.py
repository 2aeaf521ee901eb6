"""Llama, Mistral and Qwen of transformers: small random models, whose logits a model that is read must compute."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from linrope import InputError
from linrope.interop import load_llama
from linrope.interop.roformer import load_trained
from linrope.models.language_model import LanguageModelConfig
from tests.conftest import assert_input_errors
from tests.data.tokenizers.subword_files import byte_level, write_tokenizer

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 29}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, grouped": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "llama, tied, wide heads": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "head_dim": 10}),
    "llama, base and eps": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rms_norm_eps": 0.01},
    ),
    "llama 3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 12}),
    "llama, linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"num_key_value_heads": 2, "sliding_window": 9}),
    "mistral, all tokens": (MistralForCausalLM, MistralConfig, {"num_key_value_heads": 3, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 3}),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 14}),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 6, "tie_word_embeddings": True}),
}
CLOSE = {"rtol": 0, "atol": 1e-5}


def test_weights_of_several_dtypes_are_read_in_one(tmp_path):
    there = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    there.model.norm.float()
    there.save_pretrained(tmp_path)
    assert {weight.dtype for weight in load_llama(tmp_path).parameters()} == {torch.bfloat16}


def saved(kind, folder, **options):
    make, config, own = KINDS[kind]
    torch.manual_seed(0)
    model = make(config(**SIZES, **own)).eval()
    for parameter in model.parameters():  # biases of 0 and norms of 1 would hide that they are not read
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    there, ours = saved(kind, tmp_path), load_llama(tmp_path)
    tokens = torch.randint(61, (2, 37))
    with torch.no_grad():
        expected = there(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, **CLOSE)
        # transformers computes RoPE and norms in float32 always
        torch.testing.assert_close(ours.double()(tokens), there.double()(tokens).logits, **CLOSE)
        ours.float()
        logits, state = ours(tokens[:, :30], return_state=True)
        step = ours(tokens[:, 30:], state)
    torch.testing.assert_close(torch.cat((logits, step), dim=1), expected, **CLOSE)
    assert ours.n_parameters == sum(parameter.numel() for parameter in there.parameters())


def test_the_tokenizer_of_the_folder_is_the_models(tmp_path):
    saved("llama", tmp_path)
    tokenizer = write_tokenizer(tmp_path, byte_level(vocab_size=290))
    with pytest.warns(UserWarning, match="is not taken, .*: it has 290 tokens with its separator, .* 61"):
        assert load_llama(tmp_path).tokenizer == {"kind": "unknown"}
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 300}))
    weights = load_file(tmp_path / "model.safetensors")
    wider = {name: torch.cat((w, w, w, w, w))[:300] if w.shape[0] == 61 else w for name, w in weights.items()}
    save_file(wider, tmp_path / "model.safetensors")
    model = load_llama(tmp_path)
    assert model.tokenizer == {"kind": "tokenizers", "json": tokenizer.read_text()}
    assert isinstance(model.generate("hello", 3), str)
    tokenizer.write_text("{")
    with pytest.warns(UserWarning, match="is not taken, .* is not a tokenizer.json"):
        assert load_llama(tmp_path).tokenizer == {"kind": "unknown"}


def test_files_in_parts_and_older_configurations(tmp_path):
    there = saved("llama, base and eps", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = torch.randint(61, (1, 11))
    expected = there(tokens).logits
    torch.testing.assert_close(load_llama(tmp_path)(tokens), expected, **CLOSE)
    with pytest.raises(InputError, match="tokenizer"):  # its tokens are no bytes
        load_llama(tmp_path).generate("hello", 2)
    there.save_pretrained(tmp_path)  # in one file: transformers leaves the index of the parts
    assert (tmp_path / "model.safetensors.index.json").is_file()
    torch.testing.assert_close(load_llama(tmp_path)(tokens), expected, **CLOSE)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"]
    # a value of its own at the place of older versions, and defaults that they omit
    file.write_text(json.dumps({**values, "rope_theta": 77.0, "rope_scaling": None}))
    torch.testing.assert_close(load_trained(tmp_path, LanguageModelConfig)(tokens), expected, **CLOSE)
    del values["num_key_value_heads"], values["head_dim"], values["hidden_act"]
    file.write_text(json.dumps({**values, "rope_theta": 77.0}))
    torch.testing.assert_close(load_llama(tmp_path)(tokens), expected, **CLOSE)


def test_what_cannot_be_read(tmp_path):
    saved("qwen3", tmp_path)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    values = json.loads(file.read_text())

    def with_values(**others):
        def load():
            file.write_text(json.dumps({**values, **others}))
            load_llama(tmp_path)

        return load

    def with_weights(change):
        def load():
            file.write_text(json.dumps(values))
            tensors = load_file(weights)
            change(tensors)
            save_file(tensors, weights)
            load_llama(tmp_path)

        return load

    def without_two(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_norm.weight"]
        tensors["another"] = torch.zeros(1)

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    assert_input_errors(
        (with_values(model_type="gpt2"), "model_type='gpt2': decoders of llama, mistral, qwen2, qwen3"),
        (with_values(rope_parameters=yarn), "RoPE of the type 'yarn': only default, linear and llama3"),
        (with_values(rope_parameters={**LLAMA3, "high_freq_factor": 8.0}), "high_freq_factor=8.0: only 1 and 4"),
        (with_values(rope_parameters={**LLAMA3, "factor": None}), "config.json: .*scaling.factor=None must be"),
        (with_values(rope_parameters={"rope_type": "linear"}), "config.json: .*scaling.factor=None must be"),
        (with_values(rope_parameters="plain"), "rope_parameters='plain': it must be null or an object"),
        (with_values(rope_parameters={"rope_theta": None}), "rope_theta=None"),
        (with_values(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (with_values(attention_bias=True), "attention_bias=True"),
        (with_values(use_sliding_window=True), "use_sliding_window=True"),
        (with_values(hidden_act="gelu"), "hidden_act='gelu'"),
        (with_values(num_key_value_heads=4), "n_kv_heads=4 must divide n_heads=6"),
        (with_values(vocab_size=62), "weights do not fit"),
        (lambda: load_llama(tmp_path / "nothing"), "config.json cannot be read"),
        (
            with_weights(without_two),
            "missing: model.layers.1.self_attn.k_norm.weight, model.norm.weight; unexpected: another",
        ),
        (lambda: (weights.write_bytes(b"no tensors"), load_llama(tmp_path)), "damaged"),
        (lambda: (weights.unlink(), load_llama(tmp_path)), "has no model.safetensors"),
        (lambda: (file.write_text("{"), load_llama(tmp_path)), "not valid JSON"),
    )
