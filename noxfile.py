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
    """The quick tests on a real oneDNN; what follows ``--`` goes to pytest: ``--full`` is all of them."""
    session.install(".[test-full]")
    session.run("pytest", *session.posargs)


@nox.session(python="3.10")
def oldest(session):
    """The quick tests on the oldest versions that are allowed, together; what follows ``--`` goes to pytest."""
    session.run("bash", "ci/oldest.sh", *session.posargs, external=True)


@nox.session
def cpu(session):
    """All that CI does without a GPU."""
    session.run("bash", "ci/cpu.sh", external=True)


@nox.session
def rig(session):
    """The real MIOpen, executed on a CPU; needs root."""
    session.run("bash", "ci/rocm-rig.sh", *session.posargs, external=True)


@nox.session
def distributions(session):
    """The source distribution and a wheel for this machine, looked into."""
    session.run("bash", "ci/distributions.sh", "dist", external=True)
