"""`linrope generate`: prompts from options and files, states, continuations, stops, conversations."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.cli import prompts
from linrope.cli.generate import GenerateConfig, converse, generate
from linrope.cli.main import main
from linrope.cli.prompts import Prompt, cut_after_lines
from linrope.data.tokenizers.bytes import SEPARATOR, TextDecoder, encode_prompt
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.generation.decoding import read
from linrope.generation.prompt_state import save_prompt_state
from linrope.generation.sampling import Sampler, Sampling
from linrope.generation.text import TextWriter, printable
from tests.data.tokenizers.subword_files import TEXT, byte_level

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model() -> LanguageModel:
    """It writes letters and line ends, and no end of a document where the likeliest token is taken."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2}
    model = LanguageModel(LanguageModelConfig(**sizes, short_conv=4, forget_gate=True, tie_embeddings=False)).eval()
    torch.nn.init.normal_(model.embedding.weight)
    torch.nn.init.zeros_(model.output.weight)
    letters = torch.randn(27, 16)
    with torch.no_grad():
        model.output.weight[[10, *range(97, 123)]] = letters
    return model


@pytest.fixture
def folder(model, tmp_path) -> str:
    model.save_pretrained(tmp_path / "model")
    return f"--ckpt_path={tmp_path / 'model'}"


def written(model: LanguageModel, prompt: str, n: int) -> str:
    """What the model adds where the likeliest token is taken, all of it read at once each time."""
    tokens = encode_prompt(prompt)[None]
    return TextDecoder().feed(model.generate(tokens, n, temperature=0)[0, tokens.shape[1] :])


def test_the_text_and_the_speed(model, folder, capsys):
    assert main(["generate", folder, "--prompt=hello wörld", "--temperature=0", "--max_new_tokens=30"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello wörld" + written(model, "hello wörld", 30) + "\n"
    numbers = re.fullmatch(
        r"(\d+) tokens read \(([\d,]+) per second\), (\d+) tokens written \(([\d,]+) per second\)\n", err
    )
    assert numbers.group(1, 3) == ("13", "30")  # the separator and 12 bytes
    assert all(int(number.replace(",", "")) > 0 for number in numbers.group(2, 4))


def test_a_file_is_read_in_pieces_as_the_whole_text_is(model, folder, tmp_path, capsys):
    text = "".join(f"{i} é🐍 " for i in range(80))
    (tmp_path / "prompt.txt").write_text(text)
    options = ["generate", folder, "--temperature=0", "--max_new_tokens=20"]
    options += [f"--prompt_file={tmp_path / 'prompt.txt'}"]
    assert main([*options, "--segment_length=7"]) == 0
    assert capsys.readouterr().out == text + written(model, text, 20) + "\n"
    (tmp_path / "prompt.txt").write_text(text * 5)
    assert main([*options, "--segment_length=301"]) == 0
    assert capsys.readouterr().out == "…" + (text * 5)[-2000:] + written(model, text * 5, 20) + "\n"


def test_a_pipe_is_read_once(model, folder, tmp_path, capsys):
    pipe, text = tmp_path / "pipe", "a pipe ü"
    os.mkfifo(pipe)
    for content, code, shown, message in (
        (text.encode(), 0, text + written(model, text, 9) + "\n", "tokens read"),
        (b"\xff", 2, "", "invalid start byte at byte 0"),
    ):
        thread = threading.Thread(target=pipe.write_bytes, args=(content,))
        thread.start()
        assert main(["generate", folder, "--temperature=0", "--max_new_tokens=9", f"--prompt_file={pipe}"]) == code
        thread.join()
        out, err = capsys.readouterr()
        assert (out, message in err) == (shown, True)


def test_a_large_file_is_looked_through_and_read_piece_by_piece(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**26)
    tracemalloc.start()
    prompt = Prompt("", str(tmp_path / "large"))
    assert prompt.n_bytes == sum(map(len, prompt.parts(2**20))) == 2**26
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20  # a few pieces of a mebibyte, as bytes and as text
    assert list(Prompt("abc", None).parts(1)) == ["abc"]


def test_a_bar_shows_how_much_of_the_prompt_is_read(model, tmp_path):
    (tmp_path / "prompt.txt").write_text("a" * 2000)
    prompt, shown = str(tmp_path / "prompt.txt"), []
    config = GenerateConfig(ckpt_path="", prompt_file=prompt, segment_length=500, max_new_tokens=0)
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        generate(config, model, lambda text: None, console)
        shown.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()))
    assert re.search(r"prompt .*100%.*2\.0/2\.0 kB", shown[0])
    assert re.fullmatch(r"2,001 tokens read \([\d,]+ per second\)\n", shown[1])


def test_memory_is_asked_for_the_tokens_of_a_prompt_and_not_for_its_bytes(monkeypatch):
    tokenizer = SubwordTokenizer(byte_level(()))
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "n_layers": 1, "n_heads": 2}
    model = LanguageModel(LanguageModelConfig(**sizes, attention="softmax")).eval()
    model.tokenizer = tokenizer.to_serialized()
    n_tokens = len(tokenizer.encode_prompt(TEXT))
    assert n_tokens < len(TEXT) // 2
    config = GenerateConfig(ckpt_path="", prompt=TEXT, max_new_tokens=1)
    for room, fits in ((n_tokens + 1, True), (n_tokens, False)):
        monkeypatch.setattr("linrope.generation.decoding.memory_of", lambda device, n=room: model.state_bytes(n))
        with contextlib.nullcontext() if fits else pytest.raises(InputError, match=f"a text of {n_tokens + 1} tokens"):
            generate(config, model, lambda text: None, Console(file=io.StringIO()))


def test_continuations_are_those_of_the_seeds_from_one_reading(folder, capsys, monkeypatch):
    options = ["generate", folder, "--prompt=ab", "--max_new_tokens=12", "--temperature=1"]
    assert main([*options, "--seed=7", "--n_continuations=3"]) == 0
    out, err = capsys.readouterr()
    texts = re.split(r"\n--- continuation \d ---\n", out)
    assert texts[0] == "ab"
    assert err.startswith("3 tokens read")
    for number, text in enumerate(texts[1:]):
        assert main([*options, f"--seed={7 + number}"]) == 0
        assert capsys.readouterr().out.removeprefix("ab").rstrip("\n") == text.rstrip("\n")
    assert len(set(texts)) == 4


def test_a_stop_string_ends_the_text_and_is_left_out(model, folder, capsys):
    text = written(model, "ab", 60)
    stop = text[20:24]  # four tokens
    assert main(["generate", folder, "--prompt=ab", "--temperature=0", "--stop=no such text", f"--stop={stop}"]) == 0
    assert capsys.readouterr().out == "ab" + text[: text.index(stop)] + "\n"


def test_a_state_in_a_file_goes_on_with_or_without_more_text(model, folder, tmp_path, capsys):
    state = tmp_path / "state.pt"
    options = ["generate", folder, "--temperature=0", "--max_new_tokens=25"]
    assert main([*options, "--prompt=once upon", f"--save_state={state}", "--max_new_tokens=3"]) == 0
    capsys.readouterr()
    assert main([*options, f"--load_state={state}"]) == 0
    assert capsys.readouterr().out == written(model, "once upon", 25) + "\n"
    assert main([*options, f"--load_state={state}", "--prompt= a time"]) == 0
    assert capsys.readouterr().out == " a time" + written(model, "once upon a time", 25) + "\n"


def test_a_state_file_is_not_overwritten_without_being_asked(folder, tmp_path, error_of):
    state = tmp_path / "state.pt"
    options = ["generate", folder, "--prompt=a", "--max_new_tokens=0", f"--save_state={state}"]
    assert main(options) == 0
    before = state.read_bytes()
    assert f"--save_state='{state}' exists: choose another name, or replace" in error_of(*options)
    assert state.read_bytes() == before
    assert main([*options, "--overwrite", "--prompt=another"]) == 0
    assert state.read_bytes() != before
    assert "lies in a folder that does not exist" in error_of(*options, f"--save_state={tmp_path}/nowhere/state.pt")


def test_a_state_of_several_texts_is_refused(model, folder, tmp_path, error_of):
    save_prompt_state(tmp_path / "three.pt", model, read(model, encode_prompt("a")[None]).fork(3))
    err = error_of("generate", folder, f"--load_state={tmp_path / 'three.pt'}")
    assert f"--load_state='{tmp_path / 'three.pt'}' holds 3 texts: save one of them" in err


def test_a_saved_state_replaces_files_only_and_follows_links(folder, tmp_path, error_of):
    real, link, dangling, loop, pipe = (tmp_path / name for name in ("real.pt", "link.pt", "new.pt", "loop", "pipe"))
    real.write_bytes(b"before")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "made.pt")
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    options = ["generate", folder, "--prompt=a", "--max_new_tokens=0"]
    assert f"--save_state='{link}' exists" in error_of(*options, f"--save_state={link}")
    assert main([*options, f"--save_state={link}", "--overwrite"]) == 0
    assert main([*options, f"--save_state={dangling}"]) == 0
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert real.read_bytes() != b"before"
    assert (tmp_path / "made.pt").is_file()
    for path, what in [
        (pipe, "is a device or a pipe, not a file"),
        ("/dev/null", "is a device or a pipe, not a file"),
        (loop, "is a link that leads back to itself"),
        (tmp_path, "is a folder"),
    ]:
        assert f"--save_state='{path}' {what}: choose" in error_of(*options, f"--save_state={path}", "--overwrite")
    assert pipe.is_fifo()


def test_damaged_weights_end_with_a_sentence(model, tmp_path, capsys):
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "damaged")
    assert main(["generate", f"--ckpt_path={tmp_path / 'damaged'}", "--prompt=a"]) == 1
    assert "error: the model's logits are not finite: its weights are damaged" in capsys.readouterr().err


def test_mistakes_are_named_before_anything_is_read(folder, tmp_path, capsys, monkeypatch):
    for content, message in [
        (b"abc\xffdef", "invalid start byte at byte 3"),
        (b"x" * 2**20 + b"\xe2\x82", f"unexpected end of data at byte {2**20:,}"),
        (b"x" * (2**20 - 1) + b"\xc3\xa9" + b"\x80", f"invalid start byte at byte {2**20 + 1:,}"),
    ]:
        (tmp_path / "prompt.txt").write_bytes(content)
        assert main(["generate", folder, f"--prompt_file={tmp_path / 'prompt.txt'}"]) == 2
        out, err = capsys.readouterr()
        assert (f"is not UTF-8: {message}. Convert it first" in err, out) == (True, "")
    refusal = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("linrope.utils.files.tempfile.TemporaryFile", refusal)
    for options, message in [
        ([f"--save_state={tmp_path}/state.pt"], f"--save_state='{tmp_path}': cannot write there (Permission denied)."),
        (["--prompt=a\udcff"], "--prompt is not UTF-8 from character 1 on"),
        (["--prompt_file=nowhere.txt"], "--prompt_file='nowhere.txt' cannot be read: No such file"),
        ([f"--prompt_file={tmp_path}"], "cannot be read: Is a directory"),
        (["--prompt=a", "--prompt_file=b"], "exclude each other"),
        (["--prompt=a", "--stop="], "--stop='' is empty"),
        (["--interactive", "--n_continuations=2"], "--n_continuations=2 and --interactive exclude each other"),
        (["--n_continuations=0"], "--n_continuations=0 must be at least 1"),
        (["--segment_length=0"], "--segment_length=0 must be at least 1"),
        (["--repetition_penalty=0"], "repetition_penalty=0.0 must be a number from 1e-6 to 1e6"),
        (["--seed=9999999999999999999"], "seed=9999999999999999999 must be a number of at most 63 bits"),
        (["--max_new_tokens=-1"], "max_new_tokens=-1 must be a whole number, at least 0"),
        (["--load_state=nowhere.pt"], "state file 'nowhere.pt' does not exist"),
    ]:
        assert main(["generate", folder, *options]) == 2, options
        out, err = capsys.readouterr()
        assert (message in err, out) == (True, ""), options


def test_a_prompt_that_cannot_fit_is_refused(tmp_path, error_of):
    LanguageModel(LanguageModelConfig(d_model=128, attention="softmax")).save_pretrained(tmp_path / "softmax")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**27)
    # a key and a value of 128 floats in 4 layers, for each of 2^27 bytes: 512 GiB
    err = error_of("generate", f"--ckpt_path={tmp_path / 'softmax'}", f"--prompt_file={tmp_path / 'large'}")
    assert "needs 512.0 GiB for the keys and values" in err


def test_streamed_text_is_valid_utf8_whatever_the_model_writes():
    """An untrained model writes bytes in any order."""
    torch.manual_seed(0)
    model, pieces = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)).eval(), []
    writer = TextWriter(model, pieces.append)
    writer.read("é")
    writer.continue_text(400, Sampler(Sampling(seed=0)))
    assert all(piece.encode("utf-8").decode("utf-8") == piece for piece in pieces)
    assert "\ufffd" in "".join(pieces)
    assert printable("a\x1b[2J\r\n\tb") == "a\ufffd[2J\ufffd\n\tb"
    assert printable("a\u202eb\u2066c\u200f\ud800") == "a\ufffdb\ufffdc\u200f?"


# --- conversations ---------------------------------------------------------------------------------------------------


def talk(model: LanguageModel, lines: list, write, **options) -> TextWriter:
    config = GenerateConfig(ckpt_path="", interactive=True, temperature=0.0, max_new_tokens=9, **options)
    writer = TextWriter(model, write)
    writer.read("")
    converse(writer, config, Mock(side_effect=[*lines, b""]), Console(file=io.StringIO()))
    return writer


def same(writer: TextWriter, text: bytes) -> bool:
    """Whether what was read is that text, to float32's rounding."""
    expected = read(writer.model, encode_prompt(text)[None])
    return writer.state.length == expected.length and torch.allclose(writer.state.logits, expected.logits, atol=1e-4)


def test_a_conversation_is_one_text_whose_state_is_kept(model):
    shown = []
    writer = talk(model, [b"one\n", "twö\n".encode()], shown.append)
    first = written(model, "one\n", 9)
    joint = "" if first.endswith("\n") else "\n"
    second = written(model, f"one\n{first}{joint}twö\n", 9)
    assert "".join(shown) == first + joint + second + ("" if second.endswith("\n") else "\n")
    assert same(writer, f"one\n{first}{joint}twö\n{second}".encode())


def test_a_stop_string_was_read_though_it_is_not_shown(model):
    stop = written(model, "one\n", 9)[4]
    for end in ("\n", stop):
        shown = []
        writer = talk(model, [b"one\n", b"two\n"], shown.append, stop=[end])
        text = "one\n"
        for line in ("two\n", ""):
            answer = written(model, text, 9)
            text += answer[: answer.index(end) + 1] if end in answer else answer
            text += ("" if text.endswith("\n") or not line else "\n") + line
        assert same(writer, text.encode())
        assert end == "\n" or end not in "".join(shown)


def test_a_line_that_is_not_utf8_costs_that_line_only_and_ctrl_c_instead_of_one_ends_the_conversation(model):
    writer = talk(model, [b"\xff\n", b"one\n", KeyboardInterrupt, b"two\n"], lambda text: None)
    assert same(writer, f"one\n{written(model, 'one' + chr(10), 9)}".encode())


def test_the_end_of_a_document_ends_the_answer_and_is_not_read(model):
    with torch.no_grad():  # the separator becomes what the model would write after the line
        last = model.norm.register_forward_hook(lambda module, args, out: kept.append(out[0, -1]))
        kept: list[torch.Tensor] = []
        read(model, encode_prompt("one\n")[None])
        last.remove()
        model.output.weight[SEPARATOR] = 100 * kept[0]
    shown = []
    writer = talk(model, [b"one\n"], shown.append)
    assert "".join(shown) == "\n"
    assert same(writer, b"one\n")


def test_ctrl_c_ends_the_answer_and_what_was_shown_is_kept(model):
    shown = []

    def write(text: str) -> None:
        if len(shown) == 4:
            shown.append("(interrupted)")
            raise KeyboardInterrupt
        shown.append(text)

    writer = talk(model, [b"one\n", b"two\n"], write)
    answer = written(model, "one\n", 9)[:4]
    assert "".join(shown).startswith(answer + "(interrupted)\n")
    second = written(model, f"one\n{answer}\ntwo\n", 9)
    assert same(writer, f"one\n{answer}\ntwo\n{second}".encode())


@pytest.mark.exhaustive
def test_a_real_process_talks_through_a_pipe_is_interrupted_and_saves_its_state(model, folder, tmp_path):
    state = tmp_path / "state.pt"
    command = [sys.executable, "-m", "linrope.cli.main", "generate", folder, "--interactive", "--temperature=0"]
    command += ["--max_new_tokens=100000000", f"--save_state={state}"]
    # pytest-xdist's workers ignore Ctrl-C, and what they start inherits that
    pipes, heed = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), (signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, **pipes, cwd=ROOT, text=True, preexec_fn=lambda: signal.signal(*heed))
    process.stdin.write("one\n")
    process.stdin.flush()
    answer = process.stdout.read(50)
    assert answer == written(model, "one\n", 50)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("", timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert re.search(r"5 tokens read .*, [\d,]+ tokens written", err)
    assert state.is_file()
    again = GenerateConfig(ckpt_path="", load_state=str(state), max_new_tokens=5)
    generate(again, model, lambda text: None, Console(file=io.StringIO()))


def test_long_prompts_of_subwords_are_cut_after_lines_and_short_ones_nowhere(monkeypatch):
    assert list(cut_after_lines(["def f():\n  ", "  return"])) == ["def f():\n    return"]
    assert list(cut_after_lines([])) == list(cut_after_lines([""])) == [""]
    monkeypatch.setattr(prompts, "LARGEST_PART", 6)
    assert list(cut_after_lines(["ab", "c\nd", "e\n\nf", "ghijklm", "n"])) == ["abc\nde\n\n", "fghijklm", "n"]
