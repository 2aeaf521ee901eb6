"""linrope in transformers: a small trained model, exported, and taken by its Auto classes, generate and pipeline."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import linrope.interop
import linrope.interop.transformers as transformers_interop
from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.data.tokenizers.bytes import SEPARATOR, encode_prompt
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.interop.transformers import CACHE
from tests.conftest import assert_input_errors, covering
from tests.data.tokenizers.subword_files import byte_level
from tests.models.test_language_model import CONFIGS

ROOT = Path(__file__).parents[2]
TEXT = "the cat sat on the mat, "
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""float32 products of other shapes, in other pieces or with another number of threads."""
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def trained() -> LanguageModel:
    """It has learned to repeat a line."""
    torch.manual_seed(0)
    config = LanguageModelConfig(d_model=32, n_layers=1, n_heads=2, short_conv=4, forget_gate=True)
    model = LanguageModel(config)
    text = encode_prompt(TEXT * 3)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    return model.eval()


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    transformers_interop.export(trained, folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_auto_classes_take_the_folder_and_logits_losses_and_caches_are_ours(trained, loaded, folder):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    assert type(loaded) is transformers_interop.LinropeForCausalLM
    assert AutoConfig.from_pretrained(folder).linrope == trained.config.to_dict()
    tokens = encode_prompt(TEXT)[None]
    assert torch.equal(loaded(tokens).logits, trained(tokens))
    torch.testing.assert_close(loaded(tokens, logits_to_keep=3).logits, trained(tokens)[:, -3:], **CLOSE)
    labels = tokens.clone()
    labels[:, :5] = -100
    expected = F.cross_entropy(trained(tokens)[0, 4:-1], tokens[0, 5:])
    torch.testing.assert_close(loaded(tokens, labels=labels).loss, expected)
    cache = loaded(tokens[:, :10], use_cache=True)[CACHE]
    assert cache.get_seq_length() == 10
    torch.testing.assert_close(loaded(tokens[:, 10:], past_key_values=cache).logits, trained(tokens)[:, 10:], **CLOSE)
    assert loaded(tokens, use_cache=False).get(CACHE) is None


def test_generation_is_ours_with_and_without_the_cache(trained, loaded):
    tokens = encode_prompt("the cat")[None]
    expected = trained.generate(tokens, 12, temperature=0)
    assert bytes(expected[0, 1:].tolist()).decode() == "the cat sat on the mat"[:19]
    for use_cache in (True, False):
        assert torch.equal(loaded.generate(tokens, use_cache=use_cache, **GREEDY), expected)
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(*(loaded.generate(tokens, use_cache=use_cache, **beams) for use_cache in (True, False)))
    begun = loaded.generate(tokens, do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
    more = loaded.generate(begun.sequences, do_sample=False, max_new_tokens=7, **{CACHE: begun[CACHE]})
    assert torch.equal(more, expected)
    for options in ({}, {"num_beams": 3}):
        whole, parts = (
            loaded.generate(tokens.expand(2, -1), **GREEDY, **options, prefill_chunk_size=size) for size in (None, 3)
        )
        assert torch.equal(parts, whole)
    embeds = loaded.model.embedding(tokens)
    assert_input_errors(
        (lambda: loaded.generate(tokens, prefill_chunk_size=0), "prefill_chunk_size=0 must be a whole number"),
        (lambda: loaded.generate(tokens, prefill_chunk_size=3, use_cache=False), "prefill_chunk_size needs the cache"),
        (lambda: loaded.generate(inputs_embeds=embeds, prefill_chunk_size=3), "pass them in place of inputs_embeds"),
    )
    several = loaded.generate(tokens, num_return_sequences=3, do_sample=True, max_new_tokens=4)
    assert several.shape == (3, tokens.shape[1] + 4)


def test_padded_prompts_are_read_and_continued_as_if_alone(trained, loaded, tokenizer):
    prompts = ["the cat sat on", "the", "mat, the"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch.attention_mask[1].tolist() == [0] * 11 + [1] * 4
    written = loaded.generate(**batch, **GREEDY)[:, -12:]
    for row, prompt in zip(written, prompts, strict=True):
        alone = trained.generate(encode_prompt(prompt)[None], 12, temperature=0)[0, -12:]
        assert row.tolist() == alone.tolist()
    assert torch.equal(loaded.generate(**batch, **GREEDY, prefill_chunk_size=3)[:, -12:], written)
    tokens = encode_prompt(TEXT)[None]
    padded, mask = F.pad(tokens, (0, 5)), F.pad(torch.ones_like(tokens), (0, 5))
    logits = loaded(padded, attention_mask=mask).logits[:, :-5]
    torch.testing.assert_close(logits, trained(tokens), **CLOSE)


def test_text_does_not_go_on_after_padding(loaded):
    """The state of a row that ends in padding has forgotten the text before it."""
    tokens = encode_prompt(TEXT)[None]
    n, one = tokens.shape[1], torch.ones_like(tokens)
    after, before = F.pad(one, (0, 3)), F.pad(one, (3, 0))
    right = loaded(F.pad(tokens, (0, 3)), attention_mask=after)[CACHE]
    left = loaded(tokens[:, :3], attention_mask=before[:, :3])[CACHE]
    for cache, mask, more in ((right, F.pad(after, (0, 1), value=1), tokens[:, :1]), (left, before, tokens)):
        with pytest.raises(InputError, match=r"attention_mask ends in padding there: .* Pad on the left"):
            loaded(more, attention_mask=mask, past_key_values=cache)
    with pytest.raises(InputError, match=rf"is \(1, 4\) for .* after {n + 3} tokens .* pass \(1, {n + 7}\)"):
        loaded(tokens[:, :4], attention_mask=one[:, :4], past_key_values=right)
    hole = one.clone()
    hole[:, 5:8] = 0
    with pytest.raises(InputError, match="attention_mask has a hole"):
        loaded(tokens, attention_mask=hole)


def test_a_pipeline_writes_text(folder, loaded, tokenizer):
    for options in ({"model": str(folder)}, {"model": loaded, "tokenizer": tokenizer}):
        write = pipeline("text-generation", **options)
        assert write("the cat", **GREEDY)[0]["generated_text"] == "the cat sat on the mat"[:19]


def test_the_tokenizer_is_ours(tokenizer):
    for text in ("the cat", "", " é🐍  a\n\x00\r\t", "".join(map(chr, range(32, 300)))):
        ids = tokenizer(text).input_ids
        assert ids == encode_prompt(text).tolist()
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == SEPARATOR
    named = f"a{tokenizer.eos_token}b"  # no document ends itself
    assert tokenizer(named).input_ids == encode_prompt(named).tolist()


@pytest.mark.parametrize("special", [("<|endoftext|>",), ()])
def test_a_model_of_subwords_takes_its_tokenizer_along(special, tmp_path):
    """The ids are those of training, the separator among them, whether the tokenizer has one or it is our own."""
    ours = SubwordTokenizer(byte_level(special))
    model = LanguageModel(LanguageModelConfig(vocab_size=ours.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    model.tokenizer = ours.to_serialized()
    transformers_interop.export(model, tmp_path / "exported")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "def naïve(x):\n    return x<|endoftext|>"
    tokens = ours.encode_prompt(text)
    assert theirs(text)["input_ids"] == tokens.tolist()
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.separator, ours.separator)
    assert theirs.decode(tokens[1:]) == text
    back = LanguageModel.from_pretrained(tmp_path / "exported")
    assert back.tokenizer == model.tokenizer
    assert torch.equal(back(tokens[None]), model(tokens[None]))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert loaded.generation_config.eos_token_id == ours.separator


PROGRAM = """
import sys, torch, linrope
ours = linrope.LanguageModel.from_pretrained(sys.argv[1])
print(ours.training, sorted({"transformers", "lightning", "jsonargparse", "rich", "yaml"} & set(sys.modules)))
from transformers import AutoModelForCausalLM
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = torch.arange(9)[None]
loaded.save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True)
torch.save((ours(tokens), loaded(tokens).logits, again(tokens).logits), sys.argv[2])
"""


@pytest.mark.exhaustive
def test_another_program_reads_the_folder_without_transformers_and_without_the_interop(folder, trained, tmp_path):
    """`LanguageModel.from_pretrained` needs torch alone, as `import linrope` does; and with `trust_remote_code=True`
    the Auto classes take the folder although nothing registered linrope."""
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROGRAM, folder, tmp_path / "logits.pt", tmp_path / "saved"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False []\n"
    for logits in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(logits, trained(torch.arange(9)[None]), **CLOSE)
    own = {"config.json", "generation_config.json", "model.safetensors", "modeling_linrope.py", "SHA256SUMS"}
    assert {file.name for file in (tmp_path / "saved").iterdir()} == own


def test_a_tuned_model_is_saved_with_all_that_reading_needs(tmp_path):
    """As the Trainer saves its checkpoints: the weights, the code that the folder names, and the tokenizer."""
    ours = SubwordTokenizer(byte_level(()))
    model = LanguageModel(LanguageModelConfig(vocab_size=ours.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    model.tokenizer = ours.to_serialized()
    transformers_interop.export(model, tmp_path / "exported")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        tuned.model.blocks[0].mlp.out.weight += 1
    tuned.save_pretrained(tmp_path / "saved", state_dict=tuned.state_dict())
    exported, saved = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("exported", "saved"))
    assert exported == saved
    assert saved["auto_map"]["AutoModelForCausalLM"] == "modeling_linrope.LinropeForCausalLM"
    code = "from linrope.interop.transformers import LinropeConfig, LinropeForCausalLM\n"
    assert (tmp_path / "saved" / "modeling_linrope.py").read_text() == code
    back = LanguageModel.from_pretrained(tmp_path / "saved")
    assert back.tokenizer == model.tokenizer
    tokens = torch.arange(9)[None]
    assert torch.equal(back(tokens), tuned(tokens).logits)
    assert not torch.equal(back(tokens), model(tokens))


def test_a_tokenizer_may_be_saved_into_the_folder_again(trained, tmp_path):
    transformers_interop.export(trained, tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = encode_prompt(TEXT)[None]
    assert torch.equal(again(tokens).logits, trained(tokens))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json' is not the file that was saved"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_checksums_are_verified_by_both_sides_unless_asked_not_to(trained, tmp_path):
    transformers_interop.export(trained, tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"base": 10000.0', '"base": 500.0'))
    for read in (AutoModelForCausalLM, LanguageModel):
        with pytest.raises(InputError, match=r"config\.json' is not the file that was saved, by its checksum"):
            read.from_pretrained(tmp_path)
        model = read.from_pretrained(tmp_path, verify=False)
        assert getattr(model, "model", model).config.rope.base == 500
    AutoModelForCausalLM.from_pretrained(tmp_path, verify=False).save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).config.rope.base == 500


def test_lm_evaluation_harness_takes_the_folder(folder, trained):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=2)
    pairs = [("the cat", " sat on"), ("", "the mat, the cat")]
    got = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (context, continuation), (nats, greedy) in zip(pairs, got, strict=True):
        tokens, n = encode_prompt(context + continuation), len(continuation)
        logits = trained(tokens[None])[0, -n - 1 : -1]
        expected = -F.cross_entropy(logits, tokens[-n:], reduction="sum").item()
        assert nats == pytest.approx(expected, rel=1e-4)  # float32
        assert greedy == bool((logits.argmax(-1) == tokens[-n:]).all())


BY_DEFAULT = ("hybrid", "trainable rope", "scaled rope", "sinusoidal", "favor")  # parameters and buffers of all sorts


@pytest.mark.parametrize("name", covering(CONFIGS, BY_DEFAULT))
def test_every_type_of_model_comes_back_from_both_sides(name, tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS[name]).eval()
    transformers_interop.export(model, tmp_path / "model")
    assert not (tmp_path / "model" / "tokenizer.json").exists()  # its tokens are no bytes
    tokens = torch.randint(0, 40, (2, 30))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model")(tokens).logits, model(tokens))
    assert torch.equal(LanguageModel.from_pretrained(tmp_path / "model")(tokens), model(tokens))


def test_half_precision_leaves_trained_frequencies_as_they_are(tmp_path):
    model = LanguageModel(CONFIGS["trainable rope"]).eval()
    transformers_interop.export(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.model.embedding.weight.dtype == torch.bfloat16
    theta = loaded.model.blocks[0].attention.rope.theta
    assert theta.dtype == torch.float32
    assert torch.equal(theta, model.blocks[0].attention.rope.theta)
    tokens = torch.randint(0, 40, (2, 30))
    assert torch.equal(loaded(tokens).logits, model.to(torch.bfloat16)(tokens))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_command_exports_and_overwrites_only_when_asked(trained, tmp_path, capsys):
    trained.save_pretrained(tmp_path / "ours")
    output = tmp_path / "exported"
    command = ["export", f"--ckpt_path={tmp_path / 'ours'}", f"--output={output}"]
    assert main(command) == 0
    tokens = encode_prompt(TEXT)[None]
    assert torch.equal(LanguageModel.from_pretrained(output)(tokens), trained(tokens))
    before = contents(output)
    covered = {line.partition("  ")[2] for line in before["SHA256SUMS"].decode().splitlines()}
    assert covered == {"config.json", "model.safetensors", "tokenizer.json"}
    capsys.readouterr()
    assert main(command) == 2
    message = f"--output='{output}' exists and is not empty: choose another, or pass --overwrite"
    assert message in capsys.readouterr().err
    assert contents(output) == before
    other = LanguageModel(dataclasses.replace(trained.config, short_conv=0))
    other.save_pretrained(tmp_path / "ours")
    assert main([*command, "--overwrite"]) == 0
    assert LanguageModel.from_pretrained(output).config.short_conv == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "ours"]  # nothing is left over
    (tmp_path / "file").touch()
    for name, message in (("file", "is a file: choose"), ("file/below", "cannot write there (Not a directory). Give")):
        assert main([*command[:2], f"--output={tmp_path / name}"]) == 2
        assert message in capsys.readouterr().err


def test_one_folder_holds_one_model(trained, tmp_path):
    transformers_interop.export(trained, tmp_path / "model")
    other = LanguageModel(dataclasses.replace(trained.config, short_conv=0)).eval()
    trained.save_pretrained(tmp_path / "ours")
    trained.save_pretrained(tmp_path / "model")
    assert contents(tmp_path / "model") == contents(tmp_path / "ours")
    transformers_interop.export(trained, tmp_path / "model", overwrite=True)
    torch.save(other.state_dict(), tmp_path / "model" / "model.pt")
    with pytest.raises(InputError, match=r"holds both model\.pt and model\.safetensors"):
        LanguageModel.from_pretrained(tmp_path / "model")
    transformers_interop.export(other, tmp_path / "model", overwrite=True)
    tokens = encode_prompt(TEXT)[None]
    assert torch.equal(LanguageModel.from_pretrained(tmp_path / "model")(tokens), other(tokens))
    # nor is a tokenizer of the model before left in it
    silent = LanguageModel(dataclasses.replace(trained.config, vocab_size=40))  # its tokens are no bytes
    transformers_interop.export(silent, tmp_path / "fresh")
    transformers_interop.export(silent, tmp_path / "model", overwrite=True)
    assert contents(tmp_path / "model").keys() == contents(tmp_path / "fresh").keys()


def at_other_positions(model: LanguageModel) -> LanguageModel:
    """A model of the same shapes: its weights would run with the configuration of `model`, but wrongly."""
    rope = dataclasses.replace(model.config.rope, base=500.0)
    return LanguageModel(dataclasses.replace(model.config, rope=rope))


@pytest.mark.parametrize("file", ["SHA256SUMS", "model.safetensors", "config.json"])
def test_an_interrupted_export_leaves_no_mixture(file, trained, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    transformers_interop.export(trained, folder)
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target == folder / file:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        transformers_interop.export(at_other_positions(trained), folder, overwrite=True)
    for read in (LanguageModel, AutoModelForCausalLM):
        if file == "SHA256SUMS":  # the first one
            model = read.from_pretrained(folder)
            assert getattr(model, "model", model).config == trained.config
        else:
            with pytest.raises(InputError, match="a later save was interrupted"):
                read.from_pretrained(folder)


def test_an_interrupted_save_of_transformers_leaves_no_mixture(trained, tmp_path, monkeypatch):
    transformers_interop.export(trained, tmp_path)
    other = transformers_interop.LinropeForCausalLM.of(at_other_positions(trained))

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerationConfig, "save_pretrained", killed)  # after the configuration, before the weights
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(tmp_path)
    assert '"base": 500.0' in (tmp_path / "config.json").read_text()
    for read in (LanguageModel, AutoModelForCausalLM):
        with pytest.raises(InputError, match="a later save was interrupted"):
            read.from_pretrained(tmp_path)


def test_damaged_or_missing_weights_are_refused(trained, tmp_path):
    transformers_interop.export(trained, tmp_path / "model")
    (tmp_path / "model" / "SHA256SUMS").unlink()
    weights, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    content, misspelt = weights.read_bytes(), json.loads(config.read_text())
    misspelt["linrope"]["d_modle"] = 3
    damaged = [content[:100], content[:-100], b"", b"\xff" * len(content)]
    for file, text, message in [
        *((weights, text, "is damaged or not a safetensors file") for text in damaged),
        (config, b'{"model_type": "linrope"}', "None cannot be the options of LanguageModelConfig"),
        (config, b'{"\xff": 3}', "is not valid JSON"),
        (config, json.dumps(misspelt).encode(), r"'d_modle' is not an option.*Did you mean 'd_model'"),
    ]:
        before = file.read_bytes()
        file.write_bytes(text)
        with pytest.raises(InputError, match=message):
            LanguageModel.from_pretrained(tmp_path / "model")
        file.write_bytes(before)


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_missing_package_is_named_with_its_extra(folder, missing, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "safetensors":
        with pytest.raises(InputError, match=r'pip install "linrope\[hf\]"'):
            LanguageModel.from_pretrained(folder)
        return
    monkeypatch.delitem(sys.modules, "linrope.interop.transformers")
    monkeypatch.delattr(linrope.interop, "transformers")
    assert main(["export", f"--ckpt_path={folder}", f"--output={tmp_path / 'out'}"]) == 2
    assert 'transformers is not installed: pip install "linrope[hf]"' in capsys.readouterr().err


def test_a_model_of_the_hub_keeps_its_tokenizer(tmp_path):
    ours = SubwordTokenizer(byte_level(()))
    model = LanguageModel(LanguageModelConfig(vocab_size=ours.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    model.tokenizer = ours.to_serialized()
    repository = tmp_path / "models--someone--model"  # as huggingface_hub lays out what it has downloaded
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    transformers_interop.export(model, repository / "snapshots" / "abc")
    downloaded = {"cache_dir": tmp_path, "local_files_only": True}
    found = AutoModelForCausalLM.from_pretrained("someone/model", **downloaded)
    assert found.model.tokenizer == model.tokenizer
    found.save_pretrained(tmp_path / "again")
    assert LanguageModel.from_pretrained(tmp_path / "again").tokenizer == model.tokenizer
    (repository / "snapshots" / "abc" / "linrope_tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no linrope_tokenizer\.json: export the model again"):
        AutoModelForCausalLM.from_pretrained("someone/model", **downloaded)


def test_weights_in_several_files_are_read(loaded, trained, tmp_path):
    loaded.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = encode_prompt(TEXT)[None]
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(tokens), trained(tokens))
    shard = next(iter(tmp_path.glob("*.safetensors")))
    shard.unlink()
    with pytest.raises(InputError, match=f"names '{shard.name}', which is not in the folder"):
        LanguageModel.from_pretrained(tmp_path, verify=False)
