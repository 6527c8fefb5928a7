"""Builds the package and uses it as somebody who installs it; `make release-check` runs this.

1. sdist and wheel from the tracked files, checked by twine and check-wheel-contents
2. the wheel in an empty environment: every command with --help, --version, and a library call
3. the wheel with the extras `analysis` and `train`: a cheap command for every extra

Other extras have one package each, which tests install elsewhere or nothing here can run. With
--publish, the placeholder of the repository's address and an unreleased changelog are refused, too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "OWNER"
"""The owner in the repository's address until there is one."""
LIBRARY_CALL = """
import torch, slime_tis, slime_tis.diffusion, custom_tis.mis
config = slime_tis.RolloutCorrectionConfig(use_tis=True, tis_upper_bound=2.0)
train = [torch.tensor([-1.0, -2.0])]
rollout = [torch.tensor([-1.5, -4.0])]
correction = slime_tis.correct(config, train, rollout, [torch.ones(2)])
# The ratios are exp(0.5) = 1.649 and exp(2) = 7.389, of which the second is truncated to 2.
print(correction.mean([torch.ones(2)]).item(), slime_tis.__file__)
"""
LAUNCH_SCRIPT = """
python3 train.py --hf-checkpoint /m --prompt-data /p.jsonl --rm-type math --num-rollout 1 \
  --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8
"""
MODEL_CONFIG = """
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
 "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "max_position_embeddings": 128}
"""
DUMP = '{"train_log_probs": [-1.0], "rollout_log_probs": [-1.1], "loss_mask": [1]}'


@dataclass(frozen=True)
class Smoke:
    """A command in an environment, with its status and output."""

    argv: tuple[str, ...]
    output: str
    """A part of stdout or stderr."""
    status: int = 0


BASE = (
    Smoke(("slime-tis",), "usage: slime-tis"),
    Smoke(("python", "-m", "slime_tis", "--version"), "slime-tis "),
    Smoke(("slime-tis", "report", "dump.jsonl"), "pip install 'slime_tis[analysis]'", status=2),
    Smoke(("slime-tis", "port", "run.sh"), "pip install 'slime_tis[train]'", status=2),
)
"""Of the package without extras."""
EXTRAS = (
    Smoke(("slime-tis", "diagnose", "--demo", "planted"), "a repetition penalty of about 1.1"),
    Smoke(("slime-tis", "port", "run.sh"), "train.py \\\n   --hf-checkpoint /m"),
    Smoke(("slime-tis", "train"), "--hf-checkpoint is unset but required", status=2),
    Smoke(("slime-tis", "plan", "--world-size", "2", "--hf-checkpoint", "model"), "2 ranks"),
)
"""Of the package with the extras analysis and train."""


class Failed(Exception):
    """A check that failed, with what to do about it."""


def run(command: Sequence[str | Path], directory: Path) -> subprocess.CompletedProcess[str]:
    """Returns the finished process; its environment has nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)


def run_or_fail(command: Sequence[str | Path], directory: Path) -> str:
    """Returns the output of a command that must succeed."""
    process = run(command, directory)
    if process.returncode:
        words = " ".join(map(str, command))
        raise Failed(f"{words} ended with {process.returncode}:\n{process.stdout}{process.stderr}")
    return process.stdout + process.stderr


def tracked_files(root: Path) -> list[Path]:
    """Returns the files of git that exist, relative to the root."""
    listed = run_or_fail(["git", "ls-files", "-z"], root).split("\0")
    return [Path(name) for name in listed if name and (root / name).is_file()]


def copy_files(files: Sequence[Path], root: Path, directory: Path) -> None:
    """Copies the tracked files: setuptools also packs the files of an earlier build."""
    for file in files:
        target = directory / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target)


def version_of(root: Path) -> str:
    """Returns the version in slime_tis/__init__.py, its only place."""
    source = (root / "slime_tis/__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if match is None:
        raise Failed('slime_tis/__init__.py has no line __version__ = "…".')
    return match[1]


def with_absolute_links(text: str, root: Path) -> str:
    """Returns a page whose links lead to this version in the repository.

    The index shows README.md without the files that it links.
    """
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    tag = f"v{version_of(root)}"
    # An image needs the file itself, not GitHub's page about it.
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{urls['Source']}/raw/{tag}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{urls['Source']}/blob/{tag}/", text)


def check_ready_to_publish(root: Path, tag: str) -> None:
    """Refuses a release with the placeholder, an unreleased changelog or another tag."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    if f"/{PLACEHOLDER}/" in urls["Source"]:
        raise Failed(
            f'pyproject.toml has the placeholder {urls["Source"]}; CONTRIBUTING.md ("Release")'
            " says how to replace it."
        )
    version = version_of(root)
    if tag != f"v{version}":
        raise Failed(f"the tag is {tag!r}, but slime_tis/__init__.py has the version {version}.")
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", headings[0]):
        raise Failed(f"CHANGELOG.md begins with {headings[0]!r}; give {version} its date.")


def build(files: Sequence[Path], directory: Path) -> Path:
    """Builds sdist and wheel; returns the wheel.

    The wheel is built from the sdist, so that the sdist is complete.
    """
    source = directory / "source"
    packages = directory / "dist"
    copy_files(files, ROOT, source)
    readme = source / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), ROOT))
    run_or_fail([sys.executable, "-m", "build", "--outdir", packages, source], directory)
    built = sorted(packages.iterdir())
    run_or_fail([sys.executable, "-m", "twine", "check", "--strict", *built], directory)
    (wheel,) = packages.glob("*.whl")
    tool = Path(sys.executable).with_name("check-wheel-contents")
    run_or_fail([tool, "--config", source / "pyproject.toml", wheel], directory)
    return wheel


def check_contents(wheel: Path, files: Sequence[Path]) -> None:
    """Checks that the wheel has every tracked file of the packages, also page.css and the like."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = [file for file in files if file.parts[0] in ("slime_tis", "custom_tis")]
    missing = [str(file) for file in expected if file.as_posix() not in packed]
    if missing:
        raise Failed(f"the wheel lacks {missing}; add them to package-data in pyproject.toml.")


def install(bin_directory: Path, *requirements: str) -> None:
    """Installs packages, at the versions of constraints.txt."""
    command = [str(bin_directory / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    command += ["--constraint", str(ROOT / "constraints.txt"), *requirements]
    output = run_or_fail(command, bin_directory)
    project = (ROOT / "pyproject.toml").read_text()
    # pip only warns about an extra with another name, and installs the package without it.
    for warning in re.finditer(r"(\S+) \S+ does not provide the extra .+", output):
        if f'"{warning[1]}[' in project:
            raise Failed(f"pyproject.toml: {warning[0]}; use the name in the package's metadata.")


def make_environment(directory: Path) -> Path:
    """Makes an environment with torch; returns its folder of programs.

    torch comes first: a looser request for it by another package would fetch another build.
    """
    run_or_fail([sys.executable, "-m", "venv", directory], directory.parent)
    bin_directory = directory / "bin"
    install(bin_directory, "torch")
    return bin_directory


def write_inputs(directory: Path) -> None:
    """Writes the files that the commands read."""
    (directory / "model").mkdir(parents=True)
    (directory / "model/config.json").write_text(MODEL_CONFIG)
    (directory / "run.sh").write_text(LAUNCH_SCRIPT)
    (directory / "dump.jsonl").write_text(f"{DUMP}\n")


def check_smoke(smoke: Smoke, bin_directory: Path, directory: Path) -> None:
    """Runs a command, and checks its exit status and output."""
    process = run([bin_directory / smoke.argv[0], *smoke.argv[1:]], directory)
    output = process.stdout + process.stderr
    if process.returncode != smoke.status or smoke.output not in output:
        raise Failed(
            f"{' '.join(smoke.argv)} ended with {process.returncode} instead of {smoke.status}, or"
            f" without {smoke.output!r}:\n{output}"
        )


def commands(bin_directory: Path, directory: Path) -> list[str]:
    """Returns the names in the help of slime-tis."""
    output = run_or_fail([bin_directory / "slime-tis", "--help"], directory)
    names = re.findall(r"^    ([a-z][a-z-]*)(?: |$)", output, re.MULTILINE)
    if "diagnose" not in names:
        raise Failed(f"slime-tis --help lists no commands:\n{output}")
    return names


def check_base(bin_directory: Path, directory: Path, version: str) -> None:
    """Checks the package without extras."""
    check_smoke(Smoke(("slime-tis", "--version"), f"slime-tis {version}"), bin_directory, directory)
    for smoke in BASE:
        check_smoke(smoke, bin_directory, directory)
    printed = run_or_fail([bin_directory / "python", "-c", LIBRARY_CALL], directory)
    mean, location = printed.split()
    # (1.649 + 2) / 2
    if abs(float(mean) - 1.8244) > 1e-3 or str(bin_directory.parent) not in location:
        raise Failed(f"the library call printed {printed!r}.")


def check_help(bin_directory: Path, directory: Path) -> None:
    """Checks --help of every command."""
    for name in commands(bin_directory, directory):
        smoke = Smoke(("slime-tis", name, "--help"), f"usage: slime-tis {name}")
        check_smoke(smoke, bin_directory, directory)


def check_extras(bin_directory: Path, directory: Path) -> None:
    """Checks the package with the extras analysis and train."""
    for smoke in EXTRAS:
        check_smoke(smoke, bin_directory, directory)


def timed(title: str, step: Callable[[], object]) -> None:
    """Runs a step and prints its time."""
    start = time.perf_counter()
    step()
    print(f"{title:<60} ok {time.perf_counter() - start:6.1f} s", flush=True)


def check(directory: Path) -> None:
    """Builds, installs and tries the package in a directory."""
    files = tracked_files(ROOT)
    timed("sdist and wheel, twine, check-wheel-contents", lambda: build(files, directory))
    (wheel,) = (directory / "dist").glob("*.whl")
    check_contents(wheel, files)
    work = directory / "work"
    write_inputs(work)
    environment = directory / "environment"
    bin_directory = environment / "bin"
    timed("an empty environment with torch", lambda: make_environment(environment))
    timed("the wheel without extras", lambda: install(bin_directory, str(wheel)))
    version = version_of(ROOT)
    timed("commands and a library call", lambda: check_base(bin_directory, work, version))
    extras = f"{wheel}[analysis,train]"
    timed("the wheel with the extras analysis and train", lambda: install(bin_directory, extras))
    timed("every command with --help", lambda: check_help(bin_directory, work))
    timed("commands of the extras", lambda: check_extras(bin_directory, work))


def main() -> int:
    """Checks the package; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds, installs and tries the package.")
    parser.add_argument("--publish", metavar="TAG", help="also refuse what must not be published")
    parser.add_argument("--out", type=Path, help="folder for sdist and wheel")
    chosen = parser.parse_args()
    try:
        if chosen.publish is not None:
            check_ready_to_publish(ROOT, chosen.publish)
        with tempfile.TemporaryDirectory(prefix="release-check-") as temporary:
            check(Path(temporary))
            if chosen.out is not None:
                shutil.copytree(Path(temporary) / "dist", chosen.out, dirs_exist_ok=True)
    except Failed as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
