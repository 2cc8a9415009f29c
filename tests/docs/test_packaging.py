"""What is published: names and versions agree, and the wheel has all that it needs without the repository."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import meshwright
from page_blocks import ROOT, blocks, environment, side

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "meshwright"
DATA = {".json", ".html", ".js", ".gz", ".typed"}


def test_versions_agree() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "meshwright.version.VERSION"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == meshwright.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_what_checks_need_is_among_the_extras_that_they_belong_to() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[<>=\[ ]", one)[0] for one in needed} for extra, needed in extras.items()}
    for extra in ("docs", "notebook", "pages", "serve", "tensorboard", "wandb", "mlflow", "examples"):
        assert names[extra] <= names["dev"], extra


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form)
    assert all({"type", "id", "attributes"} <= set(field) for field in form["body"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, made from a copy of what is committed, without isolation because that would need a registry."""
    pytest.importorskip("build", reason="the package build makes the wheel")
    folder = tmp_path_factory.mktemp("packages")
    copy = folder / "copy"
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        ROOT / "LICENSE",
        ROOT / "CITATION.cff",
        ROOT / "MANIFEST.in",
    ]:
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.mark.thorough
def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        info = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = message_from_bytes(archive.read(info))
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and (path.suffix == ".py" or path.suffix in DATA) and "__pycache__" not in path.parts
    }
    assert found == wanted
    assert metadata["Version"] == meshwright.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"docs", "notebook", "deepspeed", "serve"} <= set(metadata.get_all("Provides-Extra", []))


@pytest.mark.thorough
def test_the_sdist_has_what_a_user_reads(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "examples/gpt.py"} <= names


@pytest.mark.thorough
def test_the_wheel_alone_plans_and_trains(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    installed, work = tmp_path / "installed", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True)
    work.mkdir()
    (work / "job.py").write_text(side(blocks("README.md", "diff")[0], "+"))
    variables = environment() | {"PYTHONPATH": str(installed)}

    def output(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=work, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(installed) in output("-c", "import meshwright; print(meshwright.__file__)")
    cluster = ("--on", "8xH100-80GB", "--fast", "--strategies", "fsdp,bf16,ac=full,mb=1")
    assert "Recommended: fsdp=8" in output("-m", "meshwright", "plan", "preset:llama3-8b", *cluster)
    train = ("train", "job.py", "--strategy", "fsdp", "--ranks", "2", "--steps", "5", "--device", "cpu")
    assert "fsdp=2 on 2 cpu ranks" in output("-m", "meshwright", *train)
