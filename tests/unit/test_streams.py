"""Which stream a handle's calls go to, on cuDNN's double."""

from doubles.build import HERE


def test_a_handle_follows_the_current_stream_and_sets_it_only_when_it_changed(run):
    seen, closed = run(
        """
        import numpy
        sys.path.insert(0, values["folder"])
        import c_table

        here, there, host = (c_table.Exchanging(device=device) for device in [(2, 0), (2, 3), (1, 0)])
        seen = []
        with pybnorm.Handle("cudnn") as handle:
            for array in (here, here, there, there, host, numpy.ones(3), here, here):
                seen.append([handle.follow_stream(array), handle.stream, number("sets").value])
                if len(seen) == 7:
                    handle.set_stream(77)
        report([seen, attempt(lambda: handle.follow_stream(here))["error"]])
        """,
        folder=HERE.parent,
    )
    streams, sets = [2000, 2000, 2003, 2003, 2003, 2003, 2000, 2000], [1, 1, 2, 2, 2, 2, 3, 5]
    follows = [True] * 4 + [False] * 2 + [True] * 2
    assert seen == list(map(list, zip(follows, streams, sets, strict=True)))
    assert closed == "ClosedError"
