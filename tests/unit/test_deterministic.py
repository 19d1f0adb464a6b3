"""Plans whose bits repeat: what is taken, refused and said. No GPU is needed: cuDNN and MIOpen are doubles."""


def test_all_of_cudnn_repeats(run, grapher):
    told = run(
        """
        import itertools
        told = []
        shape, channels_first = (4, 8, 3, 5), pybnorm.TensorDescriptor("cudnn", "f32", (4, 8, 3, 5))
        with pybnorm.Handle("cudnn") as handle:
            makes = [(handle.plan_forward_training, {}), (handle.plan_forward_inference, {}),
                     (handle.plan_backward, {}), (handle.plan_backward, {"saved": False})]
            layouts = channels_first, last(shape, "f32"), last(shape, "f32", 3)
            for (make, how), x, name in itertools.product(makes, layouts, (None, *pybnorm.algorithms("cudnn"))):
                try:
                    free = make(x, algorithm=name, **how)
                except pybnorm.UnsupportedError:
                    continue
                plan = make(x, algorithm=name, deterministic=True, **how)
                told.append([free.algorithm, free.deterministic, plan.algorithm, plan.deterministic])
        report(told)
        """,
        file=grapher,
    )
    assert len(told) > 50
    for free, repeated, taken, repeats in told:
        assert (free, repeated, repeats) == (taken, True, True)


def test_a_vendor_whose_bits_are_not_known_to_repeat_is_refused(doubles, child):
    told = child(
        """
        import pybnorm
        pybnorm.load("miopen", values["file"])
        told = []
        with pybnorm.Handle("miopen") as handle:
            with pybnorm.TensorDescriptor("miopen", "f32", (2, 3, 4, 5)) as x:
                for make in (handle.plan_forward_training, handle.plan_forward_inference, handle.plan_backward):
                    told += [make(x).deterministic, attempt(lambda: make(x, deterministic=True))]
        report(told)
        """,
        file=str(doubles.build("miopen", defines=("DOUBLE_COMPUTES",))),
    )
    assert told[::2] == [False, False, False]
    for result in told[1::2]:
        assert result["error"] == "UnsupportedError"
        assert "deterministic=True: the bits of miopen's batch norms are not known to repeat" in result["text"]
