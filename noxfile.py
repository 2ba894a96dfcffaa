"""The checks that CI runs, each in an environment of its own: `nox`, or `nox -s tests-3.9.0`."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "package", "tests-3.9.0", "tests-4.3.0", "tests-2.18.0"]
nox.options.default_venv_backend = "venv"

# TransformerLens 2.x was released before numpy 2, pyarrow 20, datasets 4 and transformers 5.
BESIDE_2X = ("numpy<2", "pyarrow<20", "datasets<4", "transformers<5")


def install(session: nox.Session, transformer_lens: str, *extra: str) -> None:
    """Install torch (first: others would choose another build), TransformerLens and this."""
    session.install("torch==2.13.0")
    beside = BESIDE_2X if transformer_lens.startswith("2.") else ()
    session.install(
        "-c", "constraints.txt", f"transformer_lens=={transformer_lens}", *beside, *extra
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install("ruff==0.17.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def package(session: nox.Session) -> None:
    """Check types; run the demo and the self-check of the package as installed, elsewhere."""
    install(session, "3.9.0", ".", "mypy==2.4.1")
    session.run("mypy")
    session.chdir(session.create_tmp())
    session.run("python", "-m", "tl_devicefix", "demo")
    session.run("python", "-m", "tl_devicefix", "selfcheck")


# Those that CI runs; the others are for `nox -s tests-3.5.1`.
IN_CI = ("3.9.0", "4.3.0", "2.18.0")


def install_tests(session: nox.Session, transformer_lens: str) -> None:
    """Install what the tests and the notebooks need."""
    # SAELens subclasses HookedTransformer, which TransformerLens 4 has not.
    libraries = "" if transformer_lens.startswith("4.") else ",sae-lens"
    install(session, transformer_lens, "-e", f".[test,notebooks{libraries}]")


def add_tests(transformer_lens: str) -> None:
    """Add a session that runs the tests, and the notebooks, on one TransformerLens version."""

    @nox.session(name=f"tests-{transformer_lens}")
    def tests(session: nox.Session) -> None:
        install_tests(session, transformer_lens)
        session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs)
        if transformer_lens in IN_CI and not session.posargs:
            session.run("pytest", "--nbmake", "notebooks", "-n", "2")


def add_full_tests(transformer_lens: str) -> None:
    """Add a session that runs every combination; the others take a cover of the large products."""

    @nox.session(name=f"full-{transformer_lens}")
    def full(session: nox.Session) -> None:
        install_tests(session, transformer_lens)
        session.run("pytest", "-n", "2", "--dist", "worksteal", "--full", *session.posargs)


for version in (*IN_CI, "2.16.1", "3.0.0", "3.5.1"):
    add_tests(version)
for version in IN_CI:
    add_full_tests(version)
