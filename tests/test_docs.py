# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""What the documentation says, held against the code: links, Python blocks, commands, settings, messages, metrics."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import yaml
from conftest import digits_reward
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

import benchmarks.__main__
import trl_calclip
from trl_calclip import CalibratedDAPOConfig, CalibratedGRPOConfig, CalibratedGRPOTrainer, cli, embedded


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CONFIGS = {"GRPOConfig": GRPOConfig, "CalibratedGRPOConfig": CalibratedGRPOConfig}
CONFIGS["CalibratedDAPOConfig"] = CalibratedDAPOConfig

FENCE = re.compile(
    r"(?:<!-- (?P<tag>[^>]*?) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """A page without its code blocks."""
    text = FENCE.sub("", path.read_text())
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading.replace("`", ""))
        found.add(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"))
    return found


def tables(path: Path) -> list[list[dict[str, str]]]:
    """Tables of a page, each a list of rows by column."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", path.read_text() + "\n", re.MULTILINE):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in block.strip().splitlines()
        ]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Tag and text of a page's code blocks in a language."""
    return [(m["tag"] or "", m["text"]) for m in FENCE.finditer(path.read_text()) if m["language"] == language]


def commands(path: Path) -> list[str]:
    """Command lines of a page: of its `bash` blocks, its indented blocks and its code spans."""
    text = path.read_text()
    lines = [line for _, block in blocks(path, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^ {4,}(\S.*)$", FENCE.sub("", text).replace("\\\n", " "), re.MULTILINE)
    lines += [span for span in CODE.findall(FENCE.sub("", text)) if " " in span]
    starts = r"^(?:\w+=\S+ )*(?:\S*/)?(make|python3?|accelerate|pip|vllm|trl|trl-calclip|pytest|torchrun)\s"
    return [re.sub(r"\s+#.*$", "", line).strip() for line in lines if re.match(starts, line.strip())]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_and_anchors_resolve(path):
    broken = []
    for target in [match["target"] for match in LINK.finditer(prose(path))]:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_files_that_are_named_exist(path):
    missing = []
    for span in CODE.findall(prose(path)):
        if re.fullmatch(r"[\w./]+/[\w.]+\.(py|yaml|toml|txt|md)", span):
            places = (ROOT / span, ROOT / "trl_calclip" / span, path.parent / span)
            missing += [] if any(place.exists() for place in places) else [span]
    assert not missing


def test_site_has_every_page_and_every_public_name():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [page for section in site["nav"] for pages in section.values() for page in pages]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    documented = re.findall(r"^::: trl_calclip\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == trl_calclip.__all__


# Python


PYTHON_BLOCKS = [
    pytest.param(path, number, id=f"{page_id(path)}-{number}")
    for path in PAGES
    for number in range(len(blocks(path, "python")))
]


@pytest.mark.parametrize(("path", "number"), PYTHON_BLOCKS)
def test_python_blocks_are_sound(path, number, tmp_path, monkeypatch):
    """Each compiles and imports what exists; its configs can be built; a block tagged `runs` runs."""
    tag, text = blocks(path, "python")[number]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CONFIGS:
            settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            CONFIGS[node.func.id](**{"output_dir": str(tmp_path), **settings, "use_cpu": True})
    if tag == "runs":
        monkeypatch.chdir(tmp_path)
        exec(compile(tree, str(path), "exec"), {"__name__": "__main__"})


def run_file(name: str, toy_path: str, monkeypatch, tmp_path) -> types.ModuleType:
    """Run a script of the drop-in guide, shortened, on the toy model."""
    (text,) = [text for tag, text in blocks(ROOT / "docs" / "drop_in.md", "python") if tag == f"file: {name}"]
    for old, new in {
        "per_device_train_batch_size=32": "per_device_train_batch_size=8",
        "max_steps=40": "max_steps=8",
        "calibration_min_tokens=300": "calibration_min_tokens=5",
    }.items():
        assert text.count(old) == (1 if name == "calibrated.py" or "calibration" not in old else 0)
        text = text.replace(old, new)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "warm_start", lambda path: toy_path)
    script = types.ModuleType(name)
    exec(compile(text, name, "exec"), script.__dict__)
    return script


@pytest.mark.slow
def test_plain_script_of_the_drop_in_guide(toy_path, monkeypatch, tmp_path):
    script = run_file("plain.py", toy_path, monkeypatch, tmp_path)
    assert type(script.trainer) is GRPOTrainer and script.trainer.state.global_step == 8


@pytest.mark.vllm
@pytest.mark.slow
def test_calibrated_script_of_the_drop_in_guide_logs_every_metric_that_is_named(toy_path, monkeypatch, tmp_path):
    script = run_file("calibrated.py", toy_path, monkeypatch, tmp_path)
    assert type(script.trainer) is CalibratedGRPOTrainer and script.trainer.state.global_step == 8
    assert script.trainer.num_rollouts == 2 and len(script.trainer.calibration_history) == 1
    logged = {name for entry in script.trainer.state.log_history for name in entry}
    pages = [ROOT / name for name in ("README.md", "docs/drop_in.md", "docs/troubleshooting.md", "docs/faq.md")]
    named = {span for path in pages for span in CODE.findall(prose(path)) if re.match(r"(calclip|sampling)/", span)}
    assert named and not {name for name in named if name not in logged and not name.endswith("/")}
    assert {"entropy", "clip_ratio/low_mean", "frac_reward_zero_std", "grad_norm"} <= logged


@pytest.mark.vllm
@pytest.mark.slow
def test_python_block_of_the_readme_trains(toy_path, toy_dataset, monkeypatch, tmp_path):
    """As it stands, but for the model and what fits the run to this machine."""
    ((_, text),) = blocks(ROOT / "README.md", "python")
    small = "use_cpu=True, max_steps=4, max_completion_length=8, vllm_max_model_length=64, calibration_min_tokens=5,"
    for old, new in {'"Qwen/Qwen3-0.6B"': repr(toy_path), "use_vllm=True,": f"use_vllm=True, {small}"}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    monkeypatch.chdir(tmp_path)
    names = {"reward": digits_reward, "dataset": toy_dataset}
    exec(compile(text, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 4 and len(names["trainer"].calibration_history) == 1


def test_drop_in_guide_shows_every_line_that_differs():
    page = ROOT / "docs" / "drop_in.md"
    scripts = {tag: {line for line in text.splitlines() if line} for tag, text in blocks(page, "python")}
    plain, calibrated = scripts["file: plain.py"], scripts["file: calibrated.py"]
    ((_, diff),) = blocks(page, "diff")
    shown = {sign: {line[1:] for line in diff.splitlines() if line.startswith(sign)} for sign in "+-"}
    assert shown == {"-": plain - calibrated, "+": calibrated - plain}


# Commands


MAKEFILE = (ROOT / "Makefile").read_text()
# Tools that are not this package's: their options are theirs.
FOREIGN = ("pip", "venv", "zipfile", "twine", "build", "pytest", "vllm.entrypoints.openai.api_server")


def check_example(script: str, arguments: list[str], tmp_path) -> None:
    assert (ROOT / script).is_file()
    dapo = Path(script).name.startswith("dapo")
    if not {"--config", "--output_dir"} & set(arguments):
        arguments = ["--config", f"configs/{'dapo' if dapo else 'grpo'}_demo.yaml", *arguments]
    parser = TrlParser((GRPOScriptArguments, CalibratedDAPOConfig if dapo else CalibratedGRPOConfig, ModelConfig))
    parser.parse_args_and_config([*arguments, "--use_cpu", "true"])


class Parsed(Exception):
    """A command's arguments were accepted."""


def check_arguments(run, arguments: list[str], monkeypatch) -> None:
    """`run(arguments)` as far as its own parser, which must accept them; a lone name must be known to it."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, given):
        parse(parser, given)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        try:
            run(arguments if arguments[1:] else [*arguments, "--help"])
        except Parsed:
            return
        except SystemExit as exit:
            assert exit.code == 0, f"{arguments} is refused"  # 0: --help
            return
    raise AssertionError(f"{arguments} never came to a parser")


def check_module(module: str, arguments: list[str], monkeypatch) -> None:
    if module in FOREIGN:
        return
    if module == "benchmarks" and arguments:
        check_arguments(benchmarks.__main__.main, arguments, monkeypatch)
    elif module == "trl_calclip.cli" and arguments:
        check_arguments(cli.main, arguments, monkeypatch)
    else:
        assert not arguments
        assert importlib.util.find_spec(module), module


def check_command(command: str, tmp_path, monkeypatch) -> None:
    words = shlex.split(command)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        passed = [word.removeprefix("ARGS=") for word in arguments if word.startswith("ARGS=")]
        if passed and arguments[0] == "demo" and "..." not in passed[0]:
            check_example("examples/grpo_fp8.py", shlex.split(passed[0]), tmp_path)
    elif program == "accelerate":
        assert arguments.pop(0) == "launch"
        while arguments[0].startswith("--"):
            del arguments[:2]
        check_example(arguments[0], arguments[1:], tmp_path)
    elif program.startswith("python") and arguments[0] == "-m":
        check_module(arguments[1], arguments[2:], monkeypatch)
    elif program.startswith("python") and arguments[0].startswith(("examples/", "scripts/")):
        assert (ROOT / arguments[0]).is_file()
    elif program == "trl-calclip":
        check_module("trl_calclip.cli", arguments, monkeypatch)
    elif program == "pip" and arguments[0] == "install":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        for wanted in re.findall(r"(?:^|-e )\.\[([\w,]+)\]", " ".join(arguments[1:])):
            assert set(wanted.split(",")) <= set(extras), wanted


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_commands_exist_with_their_options(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(path):
        if "VERSION" not in command and "..." not in command.split("ARGS=")[0]:
            check_command(command, tmp_path, monkeypatch)


def test_the_checks_of_commands_see_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(commands(ROOT / "docs" / "quickstart.md")) >= 6
    for wrong in (
        "make demmo",
        "python -m benchmarks nothing",
        "python -m benchmarks demo --sedes 1",
        "accelerate launch examples/grpo_fp9.py --config configs/grpo_demo.yaml",
        "pip install .[vlm]",
    ):
        with pytest.raises(AssertionError):
            check_command(wrong, tmp_path, monkeypatch)
    for wrong in ("--fp8_recipy rowwise", "--config configs/no.yaml", "--fp8_recipe rowise"):
        with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
            check_command(f"accelerate launch examples/grpo_fp8.py {wrong}", tmp_path, monkeypatch)


def test_servers_listen_on_loopback():
    """Every command of the pages, the examples and the scripts that starts a server says so."""
    texts = [path.read_text() for path in PAGES]
    texts += [path.read_text() for folder in ("examples", "scripts", "configs") for path in (ROOT / folder).iterdir()
              if path.is_file()]  # fmt: skip
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    starts = [line for line in lines if re.search(r"(vllm serve|trl vllm-serve|api_server) .*--", line)]
    assert not [line for line in starts if "--host 127.0.0.1" not in line]
    assert not [line for line in lines if "0.0.0.0" in line and "vllm_server_host" not in line]


def test_faults_are_counted():
    page = ROOT / "docs" / "faults.md"
    rows = [row for table in tables(page) for row in table if "fault" in row]
    assert f"**{len(rows)} faults**" in page.read_text()


# Settings and messages


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_settings_of_the_tables_are_fields_with_their_defaults(path, tmp_path):
    kind = CalibratedDAPOConfig if path.name == "dapo.md" else CalibratedGRPOConfig
    config = kind(output_dir=str(tmp_path), use_cpu=True, steps_per_generation=4)
    for table in tables(path):
        if not table or "setting" not in table[0]:
            continue
        for row in table:
            spans = CODE.findall(row["setting"])
            for span in spans:
                name, equals, value = span.partition("=")
                assert name in vars(config), name
                if equals:
                    assert ast.literal_eval(value) == vars(config)[name], name
            if "default" in row:
                defaults = ast.literal_eval(f"[{row['default'].replace('`', '')}]")
                given = [defaults] if len(spans) == 1 and row["default"].startswith("`[") else [[v] for v in defaults]
                given = [value[0] for value in given]
                assert given == [vars(config)[name] for name in spans], spans


def test_settings_tables_are_found():
    assert sum("setting" in table[0] for table in tables(ROOT / "README.md") if table) == 1
    assert sum("setting" in table[0] for table in tables(ROOT / "docs" / "dapo.md") if table) == 1


def package_sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in Path(trl_calclip.__file__).parent.rglob("*.py")}


def test_quoted_messages_are_the_packages():
    strings = []
    for tree in package_sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                strings.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    quoted = re.findall(r"^> (.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 20
    missing = [
        part.strip()
        for quote in quoted
        for part in quote.split("…")
        if part.strip(" (") and not any(part.strip() in text for text in strings)
    ]
    assert not missing


# Security


@pytest.mark.parametrize("folder", ["trl_calclip", "examples", "benchmarks", "scripts"])
def test_sources_unpickle_nothing_and_run_no_text(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            what = None
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                bad = {name.partition(".")[0] for name in modules} & {"pickle", "cloudpickle", "dill", "marshal"}
                what = ", ".join(bad)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                what = node.func.id
            elif isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                what = "torch.load" if node.value.id == "torch" else None
            elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                what = "trust_remote_code"
            elif isinstance(node, ast.Constant) and node.value == "trust_remote_code":
                what = "trust_remote_code"
            if what:
                found.append(f"{path.name}:{node.lineno} {what}")
    assert not found


# Repository habits


def test_workflow_runs_what_the_repository_has():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {".ci/run", "make lint", "make docs"} <= set(runs)
    for run in runs:
        if run.startswith("make "):
            assert re.search(rf"^{run.split()[1]}:", MAKEFILE, re.MULTILINE), run
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form), path.name


def test_linters_are_the_same_everywhere():
    texts = [
        (ROOT / name).read_text() for name in ("pyproject.toml", "requirements-cpu.txt", ".pre-commit-config.yaml")
    ]
    assert len(set(re.findall(r"ruff==([\d.]+)", "".join(texts)))) == 1
    assert len(set(re.findall(r"mypy==([\d.]+)", "".join(texts)))) == 1


def test_newcomer_finds_the_guides_commands():
    spec = importlib.util.spec_from_file_location("newcomer", ROOT / "scripts" / "newcomer.py")
    newcomer = importlib.util.module_from_spec(spec)
    sys.modules["newcomer"] = newcomer  # dataclasses look their module up
    spec.loader.exec_module(newcomer)
    steps = {guide: newcomer.read_guide((ROOT / guide).read_text()) for guide in newcomer.GUIDES}
    assert {"make demo", "make test"} <= set(steps["README.md"].commands)
    drop_in = steps["docs/drop_in.md"]
    assert drop_in.commands == ["make install", ".venv/bin/python plain.py", ".venv/bin/python calibrated.py"]
    assert list(drop_in.files) == ["plain.py", "calibrated.py"]
    assert all(compile(text, name, "exec") for name, text in drop_in.files.items())
    assert any(command.startswith("accelerate launch") for command in steps["README.md"].left_out)
