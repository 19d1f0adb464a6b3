"""The parts of continuous integration, one command each: ``nox -l`` lists them."""

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def lint(session):
    """Style, types, scripts and workflows."""
    session.install(".[lint]")
    session.run("bash", "ci/lint.sh", external=True)


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def tests(session):
    """The test suite on a real oneDNN; what follows ``--`` goes to pytest."""
    session.install(".[test]")
    session.run("pytest", *session.posargs)


@nox.session
def cpu(session):
    """All that CI does without a GPU."""
    session.run("bash", "ci/cpu.sh", external=True)


@nox.session
def rig(session):
    """The real MIOpen, executed on a CPU; needs root."""
    session.run("bash", "ci/rocm-rig.sh", *session.posargs, external=True)


@nox.session
def wheel(session):
    """A wheel for this machine, looked into."""
    session.install("build", "twine", "check-wheel-contents")
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run("bash", "-c", "twine check dist/* && check-wheel-contents dist/*.whl", external=True)
