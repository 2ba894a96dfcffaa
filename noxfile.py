"""The checks that CI runs, each in an environment of its own: `nox`, or `nox -s tests-3.9.0`."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import tarfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import nox

nox.options.sessions = ["lint", "docs", "wheel", "versions", "tests-3.9.0", "tests-4.3.0"]
# uv is much faster than pip, if it is installed; point it at the same wheels.
nox.options.default_venv_backend = "uv|venv"
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])

# Let Python write .pyc files: compiling takes most of an import's time, and a run of the tests
# starts some twenty processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# pip, uv, Hugging Face and Jupyter write to HOME: use one here if it is missing or read-only.
try:
    _home = Path.home()  # if HOME is not set, the system's
except RuntimeError:
    _home = Path(".nox")
if not os.access(_home, os.W_OK):
    _home = Path(".nox")
(_home := _home.resolve()).mkdir(exist_ok=True)
os.environ["HOME"] = str(_home)
# Tests run in a process for each core, so each has one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DIST = Path("dist").resolve()
"""Where `package` puts the wheel and the sdist."""
VERSIONS = {
    "HookedTransformer": (
        *("2.16.1", "2.18.0"),
        *("3.0.0", "3.2.1", "3.5.1", "3.7.0", "3.8.0", "3.9.0"),
    ),
    "TransformerBridge": ("3.9.0", "4.0.0", "4.1.0", "4.2.0", "4.3.0"),
}
"""Class -> the TransformerLens versions that README and docs/compatibility.md name.

`nox -s versions` runs those that are not `IN_TESTS`, and fails if the pages name others.
"""
IDS = {"HookedTransformer": "hooked", "TransformerBridge": "bridge"}
"""Class -> its id among the parameters of a test."""
EVERY_VERSION = tuple(dict.fromkeys(version for of in VERSIONS.values() for version in of))
ON_EVERY_VERSION = ("tests/versions",)
"""Files and folders of tests that CI runs on every version."""
IN_TESTS = {"4.3.0"}
"""Versions on which CI runs them with all other tests. 3.9.0's other tests have an older
transformers."""
MORE_ON = {
    "3.9.0": ("tests/twin/test_known_configs.py",),
    "2.18.0": (
        "tests/twin/test_known_configs.py",
        "tests/hooked_transformer/test_fixed_faults.py",
        "tests/monkeypatch/test_enable_and_disable.py",
        "tests/parity/test_from_pretrained.py",
        "tests/parity/test_weight_processing.py"
        "::test_method_gives_scattered_weights_what_one_device_gives",
    ),
}
"""Other tests that `nox -s versions` runs: those that depend most on the version."""

# TransformerLens 2.x was released before numpy 2, pyarrow 20, datasets 4 and transformers 5.
BESIDE_2X = ("numpy<2", "pyarrow<20", "datasets<4", "transformers<5")
# transformers 5.24 refuses peft 0.21, the newest, which the tests of 3.x load. A Bridge's tests and
# README's install command use the newest transformers.
BESIDE_PEFT = ("transformers<5.24",)


def install(session: nox.Session, transformer_lens: str, *extra: str) -> None:
    """Install torch (first, or others would choose another build), TransformerLens and this."""
    session.install("torch==2.13.0")
    has_peft = any("[test" in package for package in extra)
    beside = {"2": BESIDE_2X, "3": BESIDE_PEFT * has_peft}.get(transformer_lens[0], ())
    session.install(
        "-c", "constraints.txt", f"transformer_lens=={transformer_lens}", *beside, *extra
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, and which package imports which."""
    session.install("ruff==0.17.5", "import-linter==2.16")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/: a broken link or reference, style or spelling fails."""
    # Install the extra without the package: nothing is imported, so no torch is needed.
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    session.install("-c", "constraints.txt", *settings["options.extras_require"]["docs"].split())
    session.run("python", "docs/building/style.py")
    session.run("codespell", "README.md", "CONTRIBUTING.md", "notebooks/README.md", "docs")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def demo(session: nox.Session) -> None:
    """The demo, with TransformerLens 3.9.0: `nox -s demo`; or `nox -s demo -- 4.3.0`."""
    install(session, *(session.posargs or ["3.9.0"]), ".")
    session.chdir(session.create_tmp())
    session.run("python", "-m", "tl_devicefix", "demo")


@nox.session
def package(session: nox.Session) -> None:
    """Build and check sdist and wheel."""
    session.install("build[uv]==1.6.1", "twine==7.0.0")
    for old in DIST.glob("*"):
        old.unlink()
    session.run("python", "-m", "build", "--installer", "uv", "--outdir", str(DIST))
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    check_contents(session, wheel, sdist)


@nox.session(requires=["package"])
def wheel(session: nox.Session) -> None:
    """Install the wheel of `package`, use it as installed, elsewhere; check types."""
    # Install as README does: the newest of everything except torch.
    line = re.search(r"^pip install (.*) \. ", Path("README.md").read_text(), re.MULTILINE)
    (wheel,) = DIST.glob("*.whl")
    session.install("torch==2.13.0")
    session.install(*shlex.split(line[1] if line else ""), str(wheel))
    repository = Path.cwd()
    session.chdir(session.create_tmp())
    run_page, readme = repository / "docs/building/run_page.py", repository / "README.md"
    session.run("python", str(run_page), str(readme))

    session.chdir(repository)
    session.install("-c", "constraints.txt", "mypy==2.4.1", "pytest")
    session.run("mypy")


def check_contents(session: nox.Session, wheel: Path, sdist: Path) -> None:
    """Check that the wheel has every file of the package and nothing else, and the sdist all."""
    files = {str(path) for path in Path("tl_devicefix").rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    if inside != files:
        session.error(f"the wheel: {sorted(inside ^ files)} are in it or in the package, not both")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", *files}
    if not wanted <= inside:
        session.error(f"the sdist lacks {sorted(wanted - inside)}")
    for name in ("known_configs.json", "py.typed", "recall_checkpoint/model.safetensors"):
        if not any(path.endswith(name) for path in files):
            session.error(f"the package has no {name}")


# `nox -s full-3.9.0` runs every combination of parameters on one of these versions, outside CI;
# `nox -s tests-3.5.1` runs the tests on any.
WITH_FULL = ("3.9.0", "4.3.0", "2.18.0")
WITH_RAY = ("3.9.0",)
"""Versions whose tests use a Ray cluster; on others, workers are threads."""


def install_tests(session: nox.Session, transformer_lens: str) -> None:
    """Install what the tests and the notebooks need."""
    # SAELens subclasses HookedTransformer, which TransformerLens 4 does not have.
    libraries = "" if transformer_lens.startswith("4.") else ",sae-lens"
    if transformer_lens in WITH_RAY:
        libraries += ",hosts"
    install(session, transformer_lens, "-e", f".[test,notebooks{libraries}]")


def add_tests(transformer_lens: str) -> None:
    """Add a session that runs the tests on one TransformerLens version."""

    @nox.session(name=f"tests-{transformer_lens}")
    def tests(session: nox.Session) -> None:
        install_tests(session, transformer_lens)
        session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


def add_full_tests(transformer_lens: str) -> None:
    """Add a session that runs all: each combination of parameters."""

    @nox.session(name=f"full-{transformer_lens}")
    def full(session: nox.Session) -> None:
        install_tests(session, transformer_lens)
        session.run("pytest", "-n", "2", "--dist", "worksteal", "--full", *session.posargs)


for version in EVERY_VERSION:
    add_tests(version)
for version in WITH_FULL:
    add_full_tests(version)


@nox.session
def versions(session: nox.Session) -> None:
    """Run `ON_EVERY_VERSION` on all versions but `IN_TESTS`, in turn, and print a table.

    `nox -s versions -- tests/versions/test_smoke.py` runs other tests.
    """
    check_pages(session)
    results = session.cache_dir
    for old in results.glob("*.xml"):
        old.unlink()
    # One environment for all: only TransformerLens changes, and for 2.x what is older beside it.
    this = ["-e", ".", "pytest"]  # installed once
    for version in sorted({*EVERY_VERSION} - IN_TESTS, reverse=True):
        install(session, version, *this)
        this.clear()
        has_both = all(version in of for of in VERSIONS.values())
        options = [f"--junitxml={results / version}.xml", *["--both"] * has_both]
        paths = session.posargs or (*ON_EVERY_VERSION, *MORE_ON.get(version, ()))
        session.run("pytest", *options, *paths, success_codes=range(6))
    rows = [
        (version, cls, *result_of(results / f"{version}.xml", cls))
        for cls, of in VERSIONS.items()
        for version in of
        if version not in IN_TESTS
    ]
    for row in [("version", "class", "result", "tests", "seconds"), *rows]:
        print("{:8} {:18} {:7} {:>5} {:>8}".format(*row))
    if wrong := [f"{cls} {version}" for version, cls, result, *_ in rows if result != "right"]:
        session.error(f"not right: {', '.join(wrong)}")


def check_pages(session: nox.Session) -> None:
    """Check that README and docs/compatibility.md name the versions in `VERSIONS`, no others."""
    for page, row in {
        "README.md": r"^\| TransformerLens (.*) \| {cls} \|",
        "docs/compatibility.md": r"^## TransformerLens, {cls}\n\n\| \| (.*) \|$",
    }.items():
        text = Path(page).read_text()
        for cls, versions in VERSIONS.items():
            table = re.search(row.format(cls=cls), text, re.MULTILINE)
            named = re.findall(r"\d+\.\d+\.\d+", table[1] if table else "")
            if named != list(versions):
                session.error(f"{page} names {cls} of {named}, but {list(versions)} are run")


def result_of(report: Path, cls: str) -> tuple[str, int, str]:
    """Return "right" or "wrong", the number of tests of a class, and their seconds.

    A test that names no class counts for both. A skipped one of `ON_EVERY_VERSION` is not right.
    """
    if not report.exists():
        return "not run", 0, "-"
    others = [rf"{other}|\b{IDS[other]}\b" for other in VERSIONS if other != cls]
    tests = [
        test
        for test in ElementTree.parse(report).iter("testcase")
        if not re.search("|".join(others), test.attrib["name"])
    ]
    seconds = sum(float(test.attrib["time"]) for test in tests)
    is_right = tests and not any(
        part.tag != "skipped" or test.attrib["classname"].startswith("tests.versions")
        for test in tests
        for part in test
    )
    return "right" if is_right else "wrong", len(tests), f"{seconds:.1f}"


@nox.session
def asynchronous(session: nox.Session) -> None:
    """Tests of races, running, offloading and runs in flight, on asynchronous devices."""
    install_tests(session, "3.9.0")
    folders = ("tests/racing", "tests/dispatch", "tests/offload", "tests/pipelining")
    session.run("pytest", "-n", "2", "--asynchronous", *(session.posargs or folders))


@nox.session
def unpatched(session: nox.Session) -> None:
    """Run the tests marked `fails_unpatched` with the patches off: each has to fail."""
    install_tests(session, "3.9.0")
    session.run("pytest", "-n", "2", "--unpatched", "--both", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare 2 000 random cases with the installed TransformerLens; outside CI, which has 18.

    `nox -s fuzz -- 4.3.0 0:600` runs 600 Bridges, and `nox -s fuzz -- 3.9.0 17:18` one case.
    """
    version, seeds = session.posargs or ("3.9.0", "0:2000")
    install_tests(session, version)
    session.run("pytest", "-q", "tests/fuzz", env={"SEEDS": seeds})


@nox.session
def mutation(session: nox.Session) -> None:
    """Look for faults in weight_processing/ that its tests miss: an hour; outside CI."""
    install_tests(session, "3.9.0")
    session.install("mutmut==3.8.1")
    session.run("mutmut", "run", "--max-children", "1", *session.posargs)
    session.run("mutmut", "results")


@nox.session(name="circuit-tracer")
def circuit_tracer(session: nox.Session) -> None:
    """circuit-tracer across four simulated devices, as on one CPU; outside the default run."""
    session.install("torch==2.13.0")
    session.install(
        *("-c", "constraints.txt", "circuit-tracer==0.5.0", "transformer_lens==3.2.1"),
        *("transformers<5", "-e", ".[test]"),
    )
    session.run("pytest", *(session.posargs or ["tests/libraries/test_circuit_tracer.py", "-v"]))


@nox.session(name="dictionary-learning")
def dictionary_learning(session: nox.Session) -> None:
    """dictionary_learning trains on saved activations; outside the default run."""
    install(session, "3.9.0", "-e", ".[test]")
    # Their dependencies are for plots and remote models; install only those that are imported.
    session.install("--no-deps", "dictionary-learning==0.1.0", "nnsight==0.3.7")
    session.install("wandb", "pillow", "python-socketio[client]")
    session.run("pytest", *(session.posargs or ["tests/libraries/test_dictionary_learning.py"]))


@nox.session
def nnsight(session: nox.Session) -> None:
    """nnsight's `.source` on models of either class; outside the default run."""
    install(session, "3.9.0", "-e", ".[test]")
    session.install("nnsight==0.8.1")
    session.run("pytest", *(session.posargs or ["tests/libraries/test_nnsight.py"]))


# The ends of torch's range: setup.cfg's minimum, and the newest that the simulation supports.
OLDEST_TORCH, NEWEST_TORCH = "2.10.0", "2.15.0"


def add_torch(name: str, torch: str) -> None:
    """Add a session, outside the default run, of the tests that depend most on torch's version."""

    @nox.session(name=f"torch-{name}")
    def tests(session: nox.Session) -> None:
        """Test an end of torch's range: a CUDA build of several GB, run on the CPU."""
        install(session, "3.9.0", "-e", ".[test]")
        session.install(f"torch=={torch}")  # in place of the one in constraints.txt
        folders = ("tests/simulation", "tests/placement", "tests/dispatch")
        session.run("pytest", *(session.posargs or folders))


for name, torch in (("oldest", OLDEST_TORCH), ("newest", NEWEST_TORCH)):
    add_torch(name, torch)
