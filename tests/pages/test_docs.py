"""The examples of the documentation run.

MindSpore compiles functions of files only, so each example becomes a program in a file. All programs
run one after the other in one process, as the reader's would in a session of their own.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import model_zoo
import ms_accum

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in DOCUMENTS.items()}
COMMANDS = [
    "pip install -r requirements.txt && python train.py",
    "pip install -r requirements.txt && pytest",
]
MARK = "\x1e"  # between the outputs of examples

# Runs programs, each in a folder of its own, and writes what they printed as JSON; those of one document share
# nothing with others but the process.
RUNNER = """
import contextlib, io, json, os, pathlib, runpy, sys, traceback

results = {}
for path in sys.argv[2:]:
    folder = pathlib.Path(path).with_suffix("")
    folder.mkdir()
    os.chdir(folder)
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    results[path] = {"printed": printed.getvalue(), "error": error}
pathlib.Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
"""


def docstrings():
    """Return every docstring with examples, as doctests."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = []
    for package in (ms_accum, model_zoo):
        names = [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
        for name in names:
            if name.startswith("ms_accum._native"):  # operators of MindSpore, which Python can't import
                continue
            module = importlib.import_module(name)
            tests += [test for test in finder.find(module, name, module=module) if test.examples]
    return {test.name: test.examples for test in tests}


def is_expression(source):
    body = ast.parse(source).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def program_of(examples):
    """Return a program that prints what an interactive session would, a MARK before each example's output."""
    lines = ["import sys as _sys"]
    for example in examples:
        lines.append(f"_sys.stdout.write({MARK!r})")
        source = example.source.rstrip("\n")
        lines.append(f"_sys.displayhook((\n{source}\n))" if is_expression(source) else source)
    return "\n".join(lines) + "\n"


def blocks(text, language):
    """Return a document's code blocks in one language."""
    return re.findall(rf"^```{language}[ \t]*\n(.*?)^```[ \t]*$", text, re.MULTILINE | re.DOTALL)


def execute(programs, folder):
    """Run programs by name, in one process; return what each printed, and its traceback if it failed."""
    paths = {name: folder / f"{re.sub('[./]', '_', name)}.py" for name in programs}
    for name, source in programs.items():
        paths[name].write_text(source, encoding="utf-8")
    runner, results = folder / "run_all.py", folder / "results.json"
    runner.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{RUNNER}", encoding="utf-8")
    command = [sys.executable, str(runner), str(results), *map(str, paths.values())]
    environment = {name: value for name, value in os.environ.items() if name != "GLOG_v"}  # as the reader's
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "eliminated by mistake" not in done.stderr, done.stderr  # MindSpore's log: a call whose result is not used
    by_path = json.loads(results.read_text(encoding="utf-8"))
    return {name: by_path[str(path)] for name, path in paths.items()}


def mismatches(examples, result):
    """Return the examples whose output differs from the docstring."""
    if result["error"]:
        return [result["error"]]
    checker, wrong = doctest.OutputChecker(), []
    printed = result["printed"].split(MARK)[1:]
    for example, got in zip(examples, printed):
        flags = sum(flag for flag, wanted in example.options.items() if wanted)
        if not checker.check_output(example.want, got, flags):
            wrong.append(f"{example.source}{checker.output_difference(example, got, flags)}")
    return wrong if len(printed) == len(examples) else [*wrong, f"{len(printed)} outputs"]


def broken_links(text, folder):
    """Return the relative links of a document that point at nothing."""
    text = re.sub(r"^```.*?^```[ \t]*$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"^\[[^\]]+\]:\s*<?([^\s>]+)", text, re.MULTILINE)
    relative = [target.split("#")[0] for target in targets if not re.match(r"[a-z][a-z+.-]*:|#|//", target)]
    return [target for target in relative if not (folder / target).exists()]


DOCTESTS = docstrings()
# Of the Chinese pages, whose blocks are those of the English ones, none.
PYTHON = {name: blocks(text, "python") for name, text in TEXTS.items() if not re.search(r"\.zh\.md$|_CN\.md$", name)}
WITH_PYTHON = [name for name, sources in PYTHON.items() if sources]


def of_documents(names, folder):
    """What the blocks of documents printed; a document's blocks continue each other, so they are one program."""
    return execute({name: "\n".join(PYTHON[name]) for name in names}, folder)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the examples of all docstrings printed."""
    programs = {name: program_of(examples) for name, examples in DOCTESTS.items()}
    return execute(programs, tmp_path_factory.mktemp("programs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCTESTS)
def test_docstring_examples(name, printed):
    assert mismatches(DOCTESTS[name], printed[name]) == []


def outputs(text):
    """Return the blocks that show what a program printed: those that follow a block of Python."""
    both = r"^```python[ \t]*\n(?:(?!^```).)*^```\s*^```text[ \t]*\n(.*?)^```"
    return re.findall(both, text, re.MULTILINE | re.DOTALL)


def not_printed(shown, printed):
    """Return the blocks whose lines were not printed one after the other, in the order of the page."""
    wrong, start = [], 0
    for block in shown:
        position = f"\n{printed}".find(f"\n{block}", start)
        start = max(position, start)
        wrong += [block] if position < 0 else []
    return wrong


def faults(name, result):
    """Return what is wrong with a document whose program was run."""
    return [result["error"]] if result["error"] else not_printed(outputs(TEXTS[name]), result["printed"])


@pytest.mark.slow
def test_readme_python_runs_and_learns(tmp_path):
    result = of_documents(["README.md"], tmp_path)["README.md"]
    assert faults("README.md", result) == []
    losses = [float(loss) for loss in re.findall(r"^epoch: .* loss is ([\d.]+)", result["printed"], re.MULTILINE)]
    assert losses[-1] < losses[0] / 2  # with random labels it falls by a tenth


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """What the programs of all other documents printed."""
    return of_documents([name for name in WITH_PYTHON if name != "README.md"], tmp_path_factory.mktemp("pages"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_PYTHON if name != "README.md"])
def test_other_documents_python_runs(name, pages):
    assert faults(name, pages[name]) == []


def sections(text):
    """Return the Python of each section of a page, by its heading."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.split("\n")[0]: source for part in parts if (source := "\n".join(blocks(part, "python")))}


# Pages whose sections are read alone: each runs with the page's first lines only.
ALONE = [(name, section) for name in ("docs/migration.md", "docs/recipes.md") for section in sections(TEXTS[name])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each section printed, as a reader of this section alone runs it."""
    programs = {
        f"{name} {number}": f"{PYTHON[name][0]}\n{sections(TEXTS[name])[section]}"
        for number, (name, section) in enumerate(ALONE)
    }
    return dict(zip(ALONE, execute(programs, tmp_path_factory.mktemp("sections")).values()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "section"), ALONE)
def test_section_runs_alone(name, section, alone):
    result = alone[name, section]
    part = TEXTS[name].partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert result["error"] is None and not_printed(outputs(part), result["printed"]) == []


def test_readme_begins_with_train_and_test_commands():
    assert [block.strip() for block in blocks(TEXTS["README.md"], "bash")[:2]] == COMMANDS


def test_links_point_at_existing_files():
    broken = {name: broken_links(text, DOCUMENTS[name].parent) for name, text in TEXTS.items()}
    assert {name: links for name, links in broken.items() if links} == {}


# The checks can fail


def test_output_that_was_not_printed_is_detected():
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n```text\na command\n```\n"
    page += "```python\nf()\n```\n```text\n2\n3\n```\n"
    assert outputs(page) == ["1\n", "2\n3\n"]
    assert not_printed(outputs(page), "1\n2\n3\n") == []
    assert not_printed(outputs(page), "1\n2\nx\n3\n") == ["2\n3\n"] and not_printed(["1\n"], "21\n") == ["1\n"]
    assert not_printed(["1\n", "1\n"], "1\n") == []
