"""What tests of the check need: packages of reports, and the library that is on each of our machines."""

import pytest


@pytest.fixture(scope="session")
def plots():
    """The packages of pages and plots are here."""
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")


@pytest.fixture(scope="session")
def onednn(load_library):
    """The library of oneDNN."""
    return load_library("onednn")
