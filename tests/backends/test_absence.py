"""What is not on this machine: one named skip each, a failure where it is required; other tests are not made for it."""

import pytest

import pybnorm


@pytest.mark.parametrize("name", pybnorm.backends())
def test_its_library_is_here(load_library, name):
    assert load_library(name).backend == name


@pytest.mark.parametrize("name", pybnorm.backends())
def test_its_device_is_here(need_device, name):
    need_device(name)
    pybnorm.Handle(name).close()


def test_tests_are_made_for_what_is_here_or_must_be(monkeypatch, made_for):
    here = {name: (_loads(name), _opens(name)) for name in pybnorm.backends()}
    for variable in ("PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"):
        monkeypatch.delenv(variable, raising=False)
    for device in (False, True):
        expected = [name for name, found in here.items() if found[device]]
        assert made_for(device) == (expected or list(here))
    for variable in ("PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"):
        for required in here:
            monkeypatch.setenv(variable, required)
            # What must be here and is not is a failure of every test of it.
            if not here[required][variable == "PYBNORM_REQUIRE_DEVICE"]:
                assert required in made_for(True)
        monkeypatch.delenv(variable)


def _loads(name):
    try:
        pybnorm.load(name)
    except pybnorm.LibraryError:
        return False
    return True


def _opens(name):
    try:
        pybnorm.Handle(name).close()
    except (pybnorm.LibraryError, pybnorm.NotInitializedError):
        return False
    return True
