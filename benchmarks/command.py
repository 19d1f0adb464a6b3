"""The commands of ``pybnorm bench``. What measures is imported when a command runs."""

from __future__ import annotations

import functools

import click

from pybnorm._text import visible
from pybnorm.cli import INTERRUPTED, output
from pybnorm.errors import ArgumentError, LibraryError, NotInitializedError

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure speed and memory."""


@bench.command("reference", short_help="Time the reference against plain NumPy.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed calls of each side.")
@output.document_option("the table")
@click.pass_context
def bench_reference(context: click.Context, repeats: int, json_target: str | None) -> None:
    """The float64 reference against plain NumPy; exits with 1 beyond its limits of time and memory."""
    from benchmarks import reference

    with output.usage_errors():
        targets = output.targets(context, "bench-reference", json=json_target)
    result = reference.run(repeats=repeats)
    if "--json" in targets:
        document = output.document("pybnorm.bench-reference/1", result)
        targets["--json"].put(functools.partial(output.write_json, document))
    if json_target != "-":
        click.echo(visible(reference.render(result)), file=output.standard_output())
    context.exit(0 if result["within_limits"] else 1)


class _NothingToMeasureError(click.ClickException):
    """No library or no device."""

    exit_code = 2


@bench.command("device", short_help="Time batch norm against a copy and what else is here.")
@click.option(
    "--backend",
    help="cudnn for a GPU, onednn for the CPU. Default: cudnn where it finds a GPU, else onednn.",
)
@click.option("--algorithm", "algorithms", multiple=True, help="Of the plans. Default: auto, and fast on cuDNN.")
@click.option(
    "--shapes", multiple=True, metavar="NAME|random:COUNT[:SEED]|NxCxHxW", help="Default: h200; small on the CPU."
)
@click.option("--dtype", "dtypes", multiple=True, help="f32, f16, bf16 or f64. Default: all but f64.")
@click.option("--layout", "layouts", multiple=True, help="nchw or nhwc. Default: both.")
@click.option("--operation", "operations", multiple=True, help="train, infer or backward. Default: all.")
@click.option(
    "--rival", "rivals", multiple=True, help="What to hold it against; none: nothing. Default: all there are."
)
@click.option("--quick", is_flag=True, help="Fewer measurements of each time, and by default small shapes.")
@click.option("--host/--no-host", default=True, show_default=True, help="Measure host time per call.")
@click.option("--eager", is_flag=True, help="On a GPU, times of calls queued one by one, not of a graph.")
@click.option("--seconds", type=click.FloatRange(min=0), default=float("inf"), help="Begin no shape after this time.")
@output.document_option("the tables")
@click.option("--plot", "plot_target", metavar="FILE", help="Draw the ratio of each row, sorted: .svg, .png or .pdf.")
@click.pass_context
def bench_device(
    context: click.Context,
    backend: str | None,
    algorithms: tuple[str, ...],
    shapes: tuple[str, ...],
    dtypes: tuple[str, ...],
    layouts: tuple[str, ...],
    operations: tuple[str, ...],
    rivals: tuple[str, ...],
    quick: bool,
    host: bool,
    eager: bool,
    seconds: float,
    json_target: str | None,
    plot_target: str | None,
) -> None:
    """Device and host time of batch norm, against a copy and against what else is here.

    Options that name something may be repeated. Shapes have names too: h200, resnet50, mobilenetv2, unet3d, small;
    random shapes are those of a seed, which is printed.
    Rivals are torch, torch-native (its kernels without cuDNN) and cudnn-frontend on a GPU; torch and numpy on the CPU.

    \b
    Exit status:
      0  everything that pybnorm ran was right
      1  a call of pybnorm failed or its result was wrong, or nothing was measured
      2  no library, no device, or bad arguments; or the result could not be written
    130  interrupted; what was finished is printed
    """
    from benchmarks import device, plot, tables

    try:
        with output.usage_errors():
            if plot_target is not None:
                plot.check(plot_target)
            console = output.console(stderr=json_target == "-")
            targets = output.targets(context, "bench", json=json_target, plot=plot_target)
            with output.progress(console) as progress:
                task = progress.add_task("bench", total=None, completed=-1)
                result = device.run(
                    backend,
                    algorithms=algorithms,
                    shapes=shapes,
                    dtypes=dtypes or device.DTYPES[:3],
                    layouts=layouts or tuple(device.LAYOUTS),
                    operations=operations or device.OPERATIONS,
                    rivals=None if not rivals else tuple(name for name in rivals if name != "none"),
                    quick=quick,
                    host=host,
                    eager=eager,
                    seconds=seconds,
                    progress=lambda text, total: progress.update(task, description=text, total=total, advance=1),
                )
    except (LibraryError, NotInitializedError) as error:
        raise _NothingToMeasureError(str(error)) from None
    if "--json" in targets:
        targets["--json"].put(functools.partial(output.write_json, output.document("pybnorm.bench/1", result)))
    if json_target != "-":
        tables.render(result, console)
    if plot_target is not None:
        try:
            plot.draw(result, plot_target)
        except (OSError, ArgumentError) as error:
            raise output.WriteError(f"--plot {plot_target}", error) from None
    context.exit(INTERRUPTED if result["stopped"] == "interrupted" else 0 if result["good"] else 1)


@bench.command("model", short_help="Time steps of a ResNet-50 in PyTorch.")
@click.option(
    "--setting", "names", multiple=True, metavar="NAME", help="What to measure. Default: all; on a CPU small."
)
@click.option("--contender", "contenders", multiple=True, help="torch, installed, pybnorm or fused. Default: all.")
@click.option("--quick", is_flag=True, help="A narrow model and small images, to see that it works.")
@click.option("--seconds", type=click.FloatRange(min=0), default=float("inf"), help="Begin no setting after this time.")
@output.document_option("the result")
@click.pass_context
def bench_model(
    context: click.Context,
    names: tuple[str, ...],
    contenders: tuple[str, ...],
    quick: bool,
    seconds: float,
    json_target: str | None,
) -> None:
    """Steps of a ResNet-50 in PyTorch: with its batch norm, with its kernels replaced by pybnorm's (install),
    with pybnorm's modules (convert), and with these fused.

    \b
    Exit status:
      0  every loss was PyTorch's within the noise of the dtype
      1  a contender failed or its loss was wrong, or nothing was measured
      2  no PyTorch, or bad arguments; or the result could not be written
    """
    from benchmarks import model

    try:
        with output.usage_errors():
            console = output.console(stderr=json_target == "-")
            targets = output.targets(context, "bench", json=json_target)
            with output.progress(console) as progress:
                task = progress.add_task("model", total=None, completed=-1)
                result = model.run(
                    names,
                    contenders=contenders or model.CONTENDERS,
                    quick=quick,
                    seconds=seconds,
                    progress=lambda text, total: progress.update(task, description=text, total=total, advance=1),
                )
    except (LibraryError, NotInitializedError) as error:
        raise _NothingToMeasureError(str(error)) from None
    if "--json" in targets:
        targets["--json"].put(functools.partial(output.write_json, output.document("pybnorm.bench-model/1", result)))
    if json_target != "-":
        click.echo(visible(model.render(result)), file=output.standard_output())
    context.exit(0 if result["good"] else 1)
