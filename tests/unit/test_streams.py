"""Which stream a handle's calls go to, on cuDNN's double."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_a_handle_follows_the_current_stream_and_sets_it_only_when_it_changed(run):
    found = run(
        """
        import sys
        sys.path.insert(0, values["folder"])
        import c_table, numpy

        sets = number("sets")
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
        folder=str(TESTS),
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
