"""Doubles of the vendor libraries, and child processes to load them in."""

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from doubles.build import HERE, Doubles

import pybnorm

PACKAGES = str(Path(pybnorm.__file__).resolve().parents[1])


@pytest.fixture(scope="session")
def doubles(tmp_path_factory):
    """Builds doubles, see tests/doubles/build.py."""
    builder = Doubles(tmp_path_factory.mktemp("doubles"))
    if shutil.which(builder.compiler[0]) is None:
        pytest.fail(f"these tests compile doubles of the vendor libraries, and there is no {builder.compiler[0]!r}")
    return builder


@pytest.fixture(scope="session")
def hip_library(doubles):
    """A double of libamdhip64, not under its soname: a search in this process must not find it."""
    return Path(doubles.plain("libpybnorm-hip-double.so", (HERE / "hip.c").read_text()))


STEERING = ("PYBNORM_", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDNN_PATH", "CUDA_PATH", "CUDA_HOME", "ROCM_PATH")
STEERING += ("ROCM_HOME", "HIP_PATH", "DNNLROOT")
if "PBN_SANITIZE" not in os.environ:  # or it names the sanitizer's runtime, which ci/sanitize.sh has put there
    STEERING += ("LD_PRELOAD",)

FORKS = """
import os, signal, sys
import ml_dtypes, numpy, pybnorm

for folder in sys.stdin:  # a script of one goes on below, in a child of its own
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.chdir(folder.rstrip())
for number, name in enumerate(("/dev/null", "stdout", "stderr")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
signal.alarm(120)
exec(compile(open("script.py").read(), "script.py", "exec"))
"""


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """A process that has imported the package and loaded no library; it forks a child for each script."""
    folder, pipe = tmp_path_factory.mktemp("forks"), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], env=clean(), cwd=folder, stdin=pipe, stdout=pipe) as server:
        yield server


def clean(**changes):
    """The environment without the variables that steer the search, but for those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
    return kept | {"PYTHONPATH": PACKAGES} | {name: str(value) for name, value in changes.items()}


@pytest.fixture
def child(tmp_path, forks):
    """Runs a script, of several parts, in a process of its own: what one test loads cannot hide another's failure.

    It calls ``report(value)`` once; the value comes back through JSON. With variables of the environment, {}
    too, the interpreter is a fresh one.
    """
    answer, file = tmp_path / "answer.json", tmp_path / "script.py"

    def run(*scripts, env=None, **values):
        answer.unlink(missing_ok=True)
        prelude = PRELUDE.format(answer=str(answer), values=json.dumps(values, default=str))
        file.write_text(prelude + "".join(map(textwrap.dedent, scripts)))
        if env is None and "PBN_SANITIZE" not in os.environ:
            forks.stdin.write(f"{tmp_path}\n".encode())
            forks.stdin.flush()
            status = int(forks.stdout.readline())
            run.stdout, run.stderr = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
        else:
            command = [sys.executable, str(file)]
            done = subprocess.run(
                command, env=clean(**env or {}), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
            )
            status, run.stdout, run.stderr = done.returncode, done.stdout, done.stderr
        assert status == 0, f"exit status {status}\n{run.stdout}\n{run.stderr}"
        assert answer.exists(), f"the script reported nothing\n{run.stdout}\n{run.stderr}"
        return json.loads(answer.read_text())

    return run


PRELUDE = '''\
import json, os, sys
values = json.loads({values!r})


def report(value):
    with open({answer!r}, "w") as file:
        json.dump(value, file, default=str)


def mapped(*names):
    """Files of this process whose names begin so."""
    with open("/proc/self/maps") as file:
        paths = {{line.split(maxsplit=5)[5].strip() for line in file if len(line.split(maxsplit=5)) == 6}}
    return sorted(path for path in paths if os.path.basename(path).startswith(names))


def attempt(call):
    """What a call returned or raised, as data."""
    try:
        value = call()
    except Exception as error:
        classes = [c.__name__ for c in type(error).__mro__]
        attempts = getattr(error, "attempts", ())
        return {{"error": classes[0], "classes": classes, "text": str(error), "attempts": attempts}}
    return {{"value": value._asdict() if hasattr(value, "_asdict") else value}}


'''


# ---------------------------------------------------------------- cuDNN's double that writes down what reaches it

RECORDER = """
    import ctypes, pybnorm
    from pybnorm import Activation

    pybnorm.load("cudnn", values["file"])
    library = ctypes.CDLL(values["file"])
    log = (ctypes.c_char * (1 << 16)).in_dll(library, "double_log")

    def taken():
        "The lines written since the last time."
        lines = log.value.decode().splitlines()
        log.value = b""
        return lines

    def number(name, kind=ctypes.c_int):
        return kind.in_dll(library, f"double_{name}")

    def last(shape, dtype="f16", gap=0):
        "Packed channels-last; with a gap not packed."
        spatial, steps, step = shape[2:], [], shape[1] + gap
        for d in reversed(spatial):
            steps.insert(0, step)
            step *= d
        return pybnorm.TensorDescriptor("cudnn", dtype, shape, (step, 1, *steps))

    VECTORS = {n: 0x1000000 + 4096 * i for i, n in enumerate(
        ("scale", "bias", "running_mean", "running_variance", "saved_mean", "saved_inv_variance"))}
    SAVED = {n: VECTORS[n] for n in ("saved_mean", "saved_inv_variance")}
    FORWARD = {"x": 0x10000, "y": 0x20000, **VECTORS, "workspace": (0x100000, 8192)}
    BACKWARD = {"x": 0x10000, "dy": 0x20000, "scale": VECTORS["scale"], "dx": 0x30000, "dscale": 0x1010000,
                "dbias": 0x1020000, **SAVED, "workspace": (0x100000, 8192), "y": 0x40000, "bias": VECTORS["bias"]}
    RESERVE = (0x200000, 2048)
    """


@pytest.fixture(scope="session")
def recorder(doubles):
    """cuDNN's double that writes down what reaches it."""
    return str(doubles.build("cudnn", defines=("DOUBLE_RECORDS",)))


@pytest.fixture
def run(child, recorder):
    """Runs a script behind `RECORDER`, on that double."""
    return functools.partial(child, RECORDER, file=recorder)


@pytest.fixture(scope="session")
def beside(doubles):
    """Puts the parts that cuDNN's graph API is looked for in beside a double."""

    def put(file):
        for part in ("heuristic", "engines_precompiled", "engines_runtime_compiled"):
            shutil.copy(doubles.plain(f"libcudnn_{part}.so.9"), file.parent)
        return str(file)

    return put


@pytest.fixture(scope="session")
def grapher(doubles, beside):
    """The double with the parts that cuDNN's graph API is looked for in."""
    return beside(doubles.build("cudnn", defines=("DOUBLE_RECORDS",)))


# ---------------------------------------------------------------- cuDNN's double that computes

COMPUTER = """
    import ctypes, gc
    import ml_dtypes
    import numpy as np
    import pybnorm

    pybnorm.load("cudnn", values["file"])
    library = ctypes.CDLL(values["file"])
    GUARD = 4096
    kept = []

    def number(name):
        return ctypes.c_int.in_dll(library, f"double_{name}")

    def memory(shape, fill=np.nan, dtype=np.float32):
        "Aligned to 64 bytes; bytes of 0xa5 around it."
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size + 2 * GUARD + 64, 0xa5, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 64
        array = raw[start : start + size].view(dtype).reshape(shape)
        array[...] = fill
        kept.append((raw, start, size))
        return array

    def whole():
        "Whether nothing was written around any of it."
        return all((raw[:start] == 0xa5).all() and (raw[start + size :] == 0xa5).all() for raw, start, size in kept)

    def far(got, want, scale=1.0):
        "Infinite where either is no number, which no comparison of the worst would show."
        difference = np.abs(got.astype("f8") - want) / (scale + np.abs(want))
        return float(np.max(np.where(np.isnan(difference), np.inf, difference)))

    generator = np.random.default_rng(11)
    STORED = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
    GIVEN = {
        "plan_forward_training": ("x", "scale", "bias", "y"),
        "plan_forward_inference": ("x", "scale", "bias", "running_mean", "running_variance", "y"),
        "plan_backward": ("x", "dy", "scale", "dx", "dscale", "dbias"),
    }

    class Case:
        "Arrays of one call, and what the formulas make of them in float64."

        kind, saved, momentum = "", True, 0.1

        def __init__(self, shape, layout="nhwc", dtype="f32", epsilon=1e-3, shift=0):
            self.shape, self.layout, self.dtype, self.epsilon = tuple(shape), layout, dtype, epsilon
            self.shift = shift  # values further on than aligned memory begins
            self.axes = (0, *range(2, len(shape)))
            self.wide = tuple(shape[i] if i == 1 else 1 for i in range(len(shape)))
            self.x, self.dy = (self.data(generator.standard_normal(shape) + shift) for shift in (5, 0))
            self.y, self.dx = self.data(np.nan), self.data(np.nan)
            self.scale, self.bias = (self.vector(generator.standard_normal(shape[1])) for _ in range(2))
            self.dscale, self.dbias, self.saved_mean, self.saved_inv_variance = (self.vector() for _ in range(4))
            self.running_mean, self.running_variance = (self.vector(generator.random(shape[1])) for _ in range(2))
            self.old = self.running_mean.astype("f8"), self.running_variance.astype("f8")

        def data(self, fill):
            flat = memory((int(np.prod(self.shape)) + self.shift,), np.nan, STORED[self.dtype])[self.shift :]
            array = flat.reshape(self.shape)
            if self.layout != "nchw":
                array = flat.reshape(self.shape[0], *self.shape[2:], self.shape[1])
                array = array.transpose(0, len(self.shape) - 1, *range(1, len(self.shape) - 1))
            array[...] = fill
            return array

        def vector(self, fill=np.nan):
            return memory((self.shape[1],), fill)

        def plan(self, handle, kind, algorithm, saved=True, **options):
            strides = [step // self.x.itemsize for step in self.x.strides]
            self.kind, self.saved = kind, saved
            self.momentum = options.get("exponential_average_factor", 0.1)
            if kind != "plan_forward_inference":
                options["saved"] = saved
            with pybnorm.TensorDescriptor("cudnn", self.dtype, self.shape, strides) as desc:
                return getattr(handle, kind)(desc, algorithm=algorithm, epsilon=self.epsilon, **options)

        def run(self, plan, workspace=None, **changed):
            "With a workspace of NaN of exactly the size that the plan says."
            space = memory((plan.workspace_size,), 0xff, np.uint8) if workspace is None else workspace
            names = GIVEN[self.kind]
            if self.kind == "plan_forward_training":
                names += "running_mean", "running_variance"
                self.running_mean[...], self.running_variance[...] = self.old
            if self.kind != "plan_forward_inference" and self.saved:
                names += "saved_mean", "saved_inv_variance"
                if self.kind == "plan_backward":
                    self.saved_mean[...], self.saved_inv_variance[...] = self.statistics()
            given = {name: changed.get(name, getattr(self, name)).ctypes.data for name in names}
            plan(**given, workspace=(space.ctypes.data, space.nbytes))
            return space

        def statistics(self):
            x = self.x.astype("f8")
            return x.mean(self.axes), 1 / np.sqrt(x.var(self.axes) + self.epsilon)

        def wanted(self):
            wide = lambda v: np.asarray(v, "f8").reshape(self.wide)
            x, dy, (mean, inverse) = self.x.astype("f8"), self.dy.astype("f8"), self.statistics()
            if self.kind == "plan_forward_inference":
                mean, inverse = self.old[0], 1 / np.sqrt(self.old[1] + self.epsilon)
            count, normal = x.size // self.shape[1], (x - wide(mean)) * wide(inverse)
            if self.kind == "plan_backward":
                dscale, dbias = (dy * normal).sum(self.axes), dy.sum(self.axes)
                dx = wide(self.scale) * wide(inverse) * (dy - (wide(dbias) + normal * wide(dscale)) / count)
                return {"dx": dx, "dscale": dscale, "dbias": dbias}
            wanted = {"y": wide(self.scale) * normal + wide(self.bias)}
            if self.kind == "plan_forward_training":
                f, batch = self.momentum, (mean, x.var(self.axes) * count / (count - 1))
                new = [(1 - f) * old + f * value for old, value in zip(self.old, batch)]
                wanted |= dict(zip(("running_mean", "running_variance"), new))
                wanted |= {"saved_mean": mean, "saved_inv_variance": inverse} if self.saved else {}
            return wanted

        def errors(self):
            return {name: far(getattr(self, name), want) for name, want in self.wanted().items()}

    def finish(*results):
        gc.collect()
        report([*results, whole(), number("live").value])
    """


@pytest.fixture(scope="session")
def computing(doubles, beside):
    """The double that computes."""
    return beside(doubles.build("cudnn", defines=("DOUBLE_COMPUTES",)))


@pytest.fixture
def compute(child, computing):
    """Runs a script behind `COMPUTER`, on that double."""
    return functools.partial(child, COMPUTER, file=computing)
