"""Flags from the command line and from YAML; wrong ones are one-line errors."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import eval as evaluation
import ms_accum
import train as training
from ms_accum import selftest
from ms_accum.app import inspection, plots
from ms_accum.app.flags import Parser, number, version_of, whole
from ms_accum.app.process import TRAINING, USAGE, Failure, run
from programs import raising, refused

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {module.__name__: module.flags for module in (training, evaluation, selftest, inspection, plots)}


def example_parser():
    parser = Parser("A program for the tests.")
    parser.add_program()
    parser.add_argument("--epochs", type=whole(1), default=3)
    parser.add_argument("--lr", "--learning_rate", type=number(0, above=True), default=0.1)
    parser.add_argument("--momentum", type=number(0))
    parser.add_argument("--data_path")
    parser.add_argument("--verbose", action="store_true")
    return parser


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a configuration and returns the flag that names it."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"--config={path}"

    return write


# Flags


def test_defaults_and_flags():
    assert vars(example_parser().parse(["--lr", "0.5", "--verbose"])) == {
        "epochs": 3,
        "lr": 0.5,
        "momentum": None,
        "data_path": None,
        "verbose": True,
        "config": None,
        "debug": False,
        "device_target": "auto",
        "runtime": "tuned",
    }


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--epochs", "0"], "argument --epochs: must be an int >= 1, but got '0'"),
        (["--epochs=-1"], "argument --epochs: must be an int >= 1, but got '-1'"),
        (["--epochs", "1.5"], "argument --epochs: must be an int >= 1, but got '1.5'"),
        (["--epochs", "x"], "argument --epochs: must be an int >= 1, but got 'x'"),
        (["--epochs", ""], "argument --epochs: must be an int >= 1, but got ''"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--lr", "0"], "argument --lr/--learning_rate: must be a number > 0, but got '0'"),
        (["--lr=-1"], "argument --lr/--learning_rate: must be a number > 0, but got '-1'"),
        (["--lr", "nan"], "argument --lr/--learning_rate: must be a number > 0, but got 'nan'"),
        (["--lr", "inf"], "argument --lr/--learning_rate: must be a number > 0, but got 'inf'"),
        (["--lr", "fast"], "argument --lr/--learning_rate: must be a number > 0, but got 'fast'"),
        (["--momentum=-0.1"], "argument --momentum: must be a number >= 0, but got '-0.1'"),
        (["--unknown", "1"], "unrecognized arguments: --unknown 1"),
        (["--epoch", "1"], "unrecognized arguments: --epoch 1; did you mean --epochs?"),
        (["--data-path=x"], "unrecognized arguments: --data-path=x; did you mean --data_path?"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_wrong_flag_is_one_line_error(argv, line, capfd):
    assert refused(example_parser(), argv, capfd) == (USAGE, line)


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("12", 12)])
def test_whole_numbers(text, value):
    assert whole(1)(text) == value


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("1e-3", 0.001), ("2", 2.0)])
def test_numbers(text, value):
    assert number(0)(text) == value


def test_config_flag_without_file_is_one_line_error(capfd):
    assert refused(example_parser(), ["--config"], capfd) == (USAGE, "argument --config: expected one argument")


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        run(raising(AssertionError), example_parser(), ["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert [flag for flag in example_parser()._option_string_actions if flag not in shown] == []


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("program", PARSERS)
def test_help_fits_width_of_terminal(program, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = max(map(len, PARSERS[program]().format_help().splitlines()))
    assert longest < columns and (longest > columns - 10 or not program.startswith("train"))


def flags_of_groups(text):
    """Return the flags of each row of the table that begins with this line, but not those in parentheses."""
    rows = re.search(r"\| (?:group|分组) \|.*?\n\|---\|---\|\n((?:\|.*\n)+)", text)[1].splitlines()
    rows = [re.sub(r"[(（].*?[)）]", "", row).split("|")[1:3] for row in rows]
    return {name.strip(): set(re.findall(r"`--(\w+)", flags)) for name, flags in rows}


def test_help_has_the_documented_groups():
    groups = {
        group.title: {action.option_strings[0][2:] for action in group._group_actions}
        for group in training.flags()._action_groups[2:]  # not the positional arguments, and --help and --version
    }
    english, chinese = (
        flags_of_groups((ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8"))
        for name in ("programs.md", "programs.zh.md")
    )
    assert list(groups.items()) == list(english.items()) and len(groups) > 5
    assert list(english.values()) == list(chinese.values())


@pytest.mark.parametrize("program", PARSERS)
def test_flag_has_one_description_and_default(program):
    helps = [action.help.replace("%(default)s", "x") for action in PARSERS[program]()._actions]
    assert all(helps) and [text for text in helps if text.count("default:") > 1] == []
    assert [text for text in helps if "default:" in text and not re.search(r"\(default: [^()]+\)$", text)] == []


@pytest.mark.parametrize("program", PARSERS)
def test_version_is_shown(program, capsys):
    with pytest.raises(SystemExit) as end:
        PARSERS[program]().parse(["--version"])
    versions = f"MindSpore {metadata.version('mindspore')}, Python {platform.python_version()}"
    assert (end.value.code, capsys.readouterr().out) == (0, f"ms_accum {ms_accum.__version__}, {versions}\n")


def test_version_is_shown_without_importing_mindspore(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "train.py"), "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("ms_accum ")


def test_version_of_missing_package():
    assert version_of("no-such-package") == "is not installed"


# The configuration file


def test_config_sets_flags(config):
    flags = example_parser().parse([config("epochs: 5\nlr: 1e-3\nverbose: true\ndata_path: 数据 dir\n")])
    assert (flags.epochs, flags.lr, flags.verbose, flags.data_path) == (5, 0.001, True, "数据 dir")


def test_command_line_overrides_config(config):
    flags = example_parser().parse(["--epochs=2", config("epochs: 5\nmomentum: 0.5\n")])
    assert (flags.epochs, flags.momentum) == (2, 0.5)


def test_config_accepts_aliases(config):
    assert example_parser().parse([config("learning_rate: 0.25")]).lr == 0.25


def test_config_that_is_a_pipe_is_rejected_at_once():
    os.mkfifo("pipe")
    with pytest.raises(Failure, match="^argument --config: 'pipe' is not a file$"):
        example_parser().parse(["--config=pipe"])


@pytest.mark.parametrize("text", ["", "# nothing\n", "verbose: false\n", "{}"])
def test_empty_config_changes_nothing(config, text):
    flags, without = vars(example_parser().parse([config(text)])), vars(example_parser().parse([]))
    assert flags.pop("config") and {**flags, "config": None} == without


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs: 1\nepoch: 2\n", "unknown key 'epoch'; did you mean epochs?"),
        ("batch-size: 1\n", "unknown key 'batch-size'"),
        ("1: 2\n", "unknown key '1'; known are data_path, debug, "),
        ("--epochs: 1\n", "unknown key '--epochs'"),
        ("- epochs\n- 3\n", "run.yaml' must hold lines of the form 'flag: value'"),
        ("epochs", "run.yaml' must hold lines of the form 'flag: value'"),
        ("epochs: 0\n", "argument --epochs: must be an int >= 1, but got '0'"),
        ("lr: 1\nepochs: [1, 2]\n", "run.yaml' must hold lines of the form 'flag: value', but 'epochs' has a list"),
        ("epochs: {a: 1}\n", "run.yaml' must hold lines of the form 'flag: value', but 'epochs' has a dict"),
        ("? [epochs]\n: 1\n", "run.yaml' is not YAML: "),
        ("<<: {epochs: 1}\n", "run.yaml' must hold lines of the form 'flag: value', but '<<' has a dict"),
        ("epochs: 2001-13-01\n", "argument --epochs: must be an int >= 1, but got '2001-13-01'"),
        ("epochs: 0x10\n", "argument --epochs: must be an int >= 1, but got '0x10'"),
        ('model: "\\UFFFFFFFF"\n', "run.yaml' is not YAML: "),
        (f"epochs: {'9' * 5000}\n", "argument --epochs: must be an int >= 1, but got '999"),
        ("config: other.yaml\n", "unknown key 'config'"),
        ("help: true\n", "unknown key 'help'"),
        ("version: true\n", "unknown key 'version'"),
        ("lr: .nan\n", "argument --lr/--learning_rate: must be a number > 0, but got '.nan'"),
        ("verbose: 3\n", "argument --verbose: ignored explicit argument '3'"),
    ],
)
def test_invalid_config_is_one_line_error(config, text, expected, capfd):
    code, line = refused(example_parser(), [config(text)], capfd)
    assert code == USAGE and expected in line


def test_missing_config_is_named(capfd, tmp_path):
    code, line = refused(example_parser(), [f"--config={tmp_path / 'none.yaml'}"], capfd)
    assert code == USAGE and "none.yaml" in line


def test_folder_as_config_is_rejected(capfd, tmp_path):
    code, line = refused(example_parser(), [f"--config={tmp_path}"], capfd)
    assert code == USAGE and str(tmp_path) in line


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir [planted]",
        "epochs: !!python/object/apply:os.mkdir [planted]",
        "epochs: !!python/object/new:os.mkdir [planted]",
    ],
)
def test_config_creates_no_python_objects(config, text, capfd, tmp_path):
    code, _ = refused(example_parser(), [config(text)], capfd)
    assert code == USAGE
    assert not (tmp_path / "planted").exists()


def test_nested_aliases_in_config_are_not_expanded(config, capfd):
    """Nine lines that would be a list of a billion elements."""
    names = "abcdefghi"
    lists = [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip(names, names[1:])]
    code, line = refused(example_parser(), [config("\n".join(["epochs: 1", "a: &a [1]", *lists]))], capfd)
    assert code == USAGE and line.endswith("but 'a' has a list")


@pytest.mark.parametrize("text", ["epochs: [1\n", "a: b: c\n", b"epochs: \xff\n", "epochs: " + "[" * 1500])
def test_config_that_is_not_yaml_is_named(config, text, capfd):
    code, line = refused(example_parser(), [config(text)], capfd)
    assert code == USAGE and "run.yaml' is not YAML: " in line


def test_null_in_config_equals_absent(config):
    assert example_parser().parse([config("data_path:\n")]).data_path is None


@pytest.mark.parametrize("value", ["false", "true"])
def test_bool_is_not_accepted_as_number(config, value, capfd):
    code, line = refused(example_parser(), [config(f"epochs: {value}\n")], capfd)
    assert code == USAGE and line.startswith("argument --epochs: must be an int >= 1, but got ")


# The library's arguments and the program's flags


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("For 'f', 'data_path' must be a path, but got ''.", "argument --data_path: must be a path, but got ''."),
        (
            "For 'f', 'epoch' must be at least 2, but got 1: 'x'",
            "argument --epochs: must be at least 2, but got 1: 'x'",
        ),
        ("For 'f', 'lr' must be 1 with epochs='two'.", "argument --lr: must be 1 with --epochs two."),
        ("For 'f', the files of 'data_path' must be unpacked.", "the files of --data_path must be unpacked."),
        ("For 'a.b', 'x.safetensors' is old. Give 'lr' again.", "'x.safetensors' is old. Give --lr again."),
        ("For 'f', 'lr' must be big, but got 'epochs'.", "argument --lr: must be big, but got 'epochs'."),
        ("For 'f', 'url' must be one, but got 1.", "'url' must be one, but got 1."),
        ("'run.yaml' has the key 'epochs' twice", "'run.yaml' has the key 'epochs' twice"),
    ],
)
def test_library_errors_name_flags(message, line, capfd):
    assert refused(example_parser(), [], capfd, main=raising(ValueError(message))) == (TRAINING, line)


def test_batch_size_error_names_the_flag_that_was_given(capfd):
    flags = example_parser()
    for flag in ("--batch_size", "--effective_batch"):
        flags.add_argument(flag, type=int)
    named = []
    for argv in (["--batch_size=7"], ["--batch_size=7", "--effective_batch=9"]):
        assert run(raising(ValueError("For 'f', 'batch_size' must be <= 5, but got 9.")), flags, argv) == TRAINING
        named.append(capfd.readouterr().err)
    assert [line.split(":")[1] for line in named] == [" argument --batch_size", " argument --effective_batch"]
