"""Which stream a handle's calls go to, with a double of cuDNN that remembers."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_a_handle_follows_the_current_stream_and_sets_it_only_when_it_changed(child, doubles):
    library = doubles.build("cudnn", defines=("DOUBLE_STREAMS=1",))
    found = child(
        """
        import ctypes, sys
        sys.path.insert(0, values["folder"])
        import c_table, numpy, pybnorm

        sets = ctypes.c_int.in_dll(ctypes.CDLL(values["library"]), "double_sets")
        here, there, host = (c_table.Exchanging(device=device) for device in [(2, 0), (2, 3), (1, 0)])
        seen = []
        with pybnorm.Handle("cudnn") as handle:
            for array in (here, here, there, there, host, numpy.ones(3), here):
                seen.append([handle.follow_stream(array), handle.stream, sets.value])
            handle.set_stream(77)
            seen.append([handle.follow_stream(here), handle.stream, sets.value])
        closed = attempt(lambda: handle.follow_stream(here))
        report([seen, closed["error"]])
        """,
        {"PYBNORM_LIB_CUDNN": library},
        folder=str(TESTS),
        library=str(library),
    )
    assert found[0] == [
        [True, 2000, 1],
        [True, 2000, 1],
        [True, 2003, 2],
        [True, 2003, 2],
        [False, 2003, 2],
        [False, 2003, 2],
        [True, 2000, 3],
        [True, 2000, 5],
    ]
    assert found[1] == "ClosedError"
