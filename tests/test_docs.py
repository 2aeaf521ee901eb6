"""README, docs and CONTRIBUTING: their Python runs, their commands parse, and what they name exists."""

from __future__ import annotations

import argparse
import importlib.util
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonargparse
import pytest
import torch

from linrope.cli.main import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q -e {} -c constraints.txt && .venv/bin/"
PREPARATIONS = (r"pip install -e '?\.(\[\w+(,\w+)*\])?'?$", r"\. \.venv/bin/activate$")


def blocks(language: str) -> list:
    """The code blocks of one language, on all pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S):
            found.append(pytest.param(block[1], id=f"{page.name}:{text[: block.start()].count(chr(10)) + 1}"))
    return found


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # without the future imports of this file
        exec(compile(code, "example", "exec", dont_inherit=True), {"__name__": "example"})


class Parsed(BaseException):  # not an Exception: commands catch some of those
    """A command's options were parsed without an error; the command itself does not run."""

    def __init__(self, options: object):
        self.options = options


@pytest.fixture(scope="module")
def _parse_only():
    def stop_after(parse):
        def parse_args(self, *args, **kwargs):
            raise Parsed(parse(self, *args, **kwargs))

        return parse_args

    with pytest.MonkeyPatch.context() as patch:
        for parser in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
            patch.setattr(parser, "parse_args", stop_after(parser.parse_args))
        for command in ("validate", "test", "predict"):  # there may be no run here
            patch.setattr(f"linrope.cli.{command}.with_run_config", list)
        patch.chdir(ROOT)
        yield


def commands(text: str) -> Iterator[list[str]]:
    """The command lines of a shell block as words, its variables replaced."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if len(words) == 1 and (given := re.fullmatch(r"(\w+)=(.*)", words[0])):
            variables[given[1]] = given[2]
        elif words:
            yield [variables[word[1:]] if word.startswith("$") else word for word in words]


def run(words: list[str]) -> None:
    """What the shell does with a `linrope` or `python -m benchmarks.NAME` command, in this process."""
    if words[0] == "linrope":
        main(words[1:])
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[2:])
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def parse(words: list[str]) -> object:
    """The options of a command; a test fails where they do not parse."""
    with pytest.raises(Parsed) as parsed:
        run(words)
    return parsed.value.options


def is_ours(words: list[str]) -> bool:
    return words[:1] == ["linrope"] or (words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."))


@pytest.mark.usefixtures("_parse_only")
@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_parse(text):
    for words in commands(text):
        line = shlex.join(words)
        if is_ours(words):
            parse(words)
        elif line not in INSTALL_COMMANDS:
            assert any(re.match(shape, line) for shape in PREPARATIONS), line


@pytest.mark.usefixtures("_parse_only")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_prose_parse(page):
    """Those with options; a command without them is only its name."""
    for code in inline_code(page):
        words = shlex.split(code) if "--" in code else []
        if is_ours(words) and "--help" not in words:
            parse(words)


@pytest.mark.usefixtures("_parse_only")
@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_configuration(text, tmp_path):
    (tmp_path / "part.yaml").write_text(text)
    parse(["linrope", "fit", "--config", "configs/quickstart.yaml", "--config", str(tmp_path / "part.yaml")])


@pytest.mark.usefixtures("_parse_only")
def test_a_wrong_option_is_found():
    with pytest.raises(pytest.fail.Exception):
        parse(["linrope", "fit", "--config", "configs/quickstart.yaml", "--model.n_layer", "3"])
    with pytest.raises(SystemExit):
        parse(["python", "-m", "benchmarks.copying", "--modell", "x"])


TRAIN = INSTALL.format(".") + "linrope fit --config configs/quickstart.yaml"
TEST = INSTALL.format('".[test]"') + "python -m pytest"
INSTALL_COMMANDS = [shlex.join(shlex.split(command)) for command in (TRAIN, TEST)]


def test_the_readme_has_the_two_commands():
    lines = README.read_text().splitlines()
    assert lines.count(TRAIN) == lines.count(TEST) == 1
    assert [line for line in lines if re.match(r"^python3 -m venv .* pytest$", line)] == [TEST]  # what .ci/run runs


def test_the_readme_fits_on_a_page_and_links_every_other_page():
    assert len(README.read_text().splitlines()) <= 150
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README.read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_resolve_files_exist_and_no_gap_is_left(page):
    """Files under configs/, benchmarks/ and docs/, constraints.txt, and the modules of benchmarks."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target
    named = set(re.findall(r"(?:configs|benchmarks|docs)/[\w./-]*\w|constraints\.txt", page.read_text()))
    assert [name for name in named if not (ROOT / name).exists()] == []
    for name in set(re.findall(r"python -m\s+(benchmarks\.\w+)", page.read_text())) - {"benchmarks.NAME"}:
        assert importlib.util.find_spec(name), name
    assert not re.search(r"[A-Z]+-FIGURES|TODO", page.read_text())


@pytest.mark.usefixtures("_parse_only")
def test_options_and_names_exist():
    """`data.path`, `rope.base`, `linrope.interop`, ...: what stands alone in inline code, or with a value."""
    values = parse(["linrope", "fit", "--config", "configs/quickstart.yaml"]).as_dict()
    values = {section: options for section, options in values.items() if isinstance(options, dict)}
    values |= {section: values["model"][section] for section in ("rope", "positions")}
    for page in PAGES:
        for code in inline_code(page):
            name = re.match(r"(\w+(?:\.\w+)+)(: .*)?$", code)
            if name and (section := name[1].split(".")[0]) in values:
                options = values[section]
                for option in name[1].split(".")[1:]:
                    assert option in options.get("init_args", options), f"{page.name}: {code}"
                    options = options[option]
            elif name and section == "linrope":
                pkgutil.resolve_name(name[1])
