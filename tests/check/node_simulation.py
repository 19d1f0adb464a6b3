"""A check over many dask workers whose library is a double that sleeps: some die, some hang, some differ, one has none.

The workers are threads of a few processes; all else is what ``pybnorm check --executor dask:ADDRESS`` is made of.
Prints what was found, and exits with 1 if a case is lost, counted twice or said to be of another node or version.

    python tests/check/node_simulation.py [--cases N] [--nodes N] [--seconds S] [--limit S] [--compare]
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from pybnorm.check.judging.bounds import Point, Status, Verdict
from pybnorm.check.run.runner import BackendInfo, CaseResult, identified

CASE = "train,spatial,f32,nchw,2x3x4x4,seed={}"
OUTPUTS = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
BAD = 97
"""Of so many cases one fails, on every node."""
IDLE = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "2s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "60s",
}
"""Less of the housekeeping that each worker does up to a hundred times a second: here they share a machine."""
_handled = Counter()


def kinds(nodes):
    """What each worker does, by its number: a tenth dies, a twentieth hangs, one has no library."""
    dying, hanging = max(1, nodes // 10), max(1, nodes // 20)
    return ["dies"] * dying + ["hangs"] * hanging + ["absent"] + ["works"] * (nodes - dying - hanging - 1)


def library(backend, number):
    info = BackendInfo(backend, "double", (3, 1 + number % 2, 0), f"/node{number}/libdouble.so", "made", digest="d")
    return identified(info)


def _this():
    import distributed

    name = str(distributed.get_worker().name)  # NUMBER-KIND
    number, _, kind = name.partition("-")
    return name, int(number), kind


def settled(backend, timeout, index):
    """In place of `pybnorm.check.run.executors.settled`."""
    _, number, kind = _this()
    if kind == "absent":
        return BackendInfo(backend, problem="double: no library here"), {}
    return library(backend, number), {}


def isolated(backend, timeout, variables, function, opener, _, case, keep):
    """In place of `pybnorm.check.run.executors.isolated`: no process, no call, a verdict of usual size."""
    name, number, kind = _this()
    _handled[name] += 1
    seed = int(case.rpartition("=")[2])
    if kind == "hangs" and _handled[name] == 3:
        threading.Event().wait()
    if kind == "dies" and _handled[name] == 4:
        os._exit(1)
    time.sleep(float(os.environ["SIMULATED_SECONDS"]))
    status = Status.FAIL if seed % BAD == 0 else Status.PASS
    points = [Point((0, 0, 0, i), 1.0 + i, 1.0, 1e-6, 0.5) for i in range(10 if status == Status.FAIL else 1)]
    verdicts = [Verdict(out, status, "A", 0.5, {"A": 0.5}, 96, worst=list(points)) for out in OUTPUTS]
    info = library(backend, number)
    return CaseResult(backend, case, status, verdicts, host=f"{name}:1", library=info.id, repeat="equal"), info


# ---------------------------------------------------------------- processes


async def _serving(address, names, folder):
    """A scheduler, where there is no address of one, and workers, in this process until its owner ends."""
    import distributed

    if not address:
        scheduler = await distributed.Scheduler(port=0, dashboard_address=":0", host="127.0.0.1")
        address = scheduler.address
    options = {"nthreads": 1, "memory_limit": 0, "local_directory": folder, "dashboard_address": ":0"}
    made = [await distributed.Worker(address, name=name, **options) for name in names]
    print(address, len(made), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # some of its threads sleep for ever


def _started(*arguments, seconds=0.0):
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        env=os.environ | IDLE | {"SIMULATED_SECONDS": str(seconds), "DASK_LOGGING__DISTRIBUTED": "critical"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().split()[0]


def _processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- the collecting process


def collect(address, suite, folder, limit):
    """Run the command on the cluster of the doubles; what it wrote, its memory and its time."""
    import node_simulation  # by this name the workers know the doubles

    from pybnorm import cli
    from pybnorm.check.run import executors

    executors.settled, executors.isolated = node_simulation.settled, node_simulation.isolated
    executors.GRACE = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    arguments = ["check", "--executor", f"dask:{address}", "--suite", suite, "--save", folder, "--backend", "onednn"]
    status = 0
    try:
        with open(f"{folder}.txt", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            cli.main([*arguments, "--timeout", str(limit)], standalone_mode=True)
    except SystemExit as ended:
        status = ended.code
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"status": status, "wall": time.monotonic() - started, "processor": usage.ru_utime + usage.ru_stime}
    print(json.dumps(figures | {"peak": usage.ru_maxrss / 1024, "before": before / 1024}))


def compared(folders, place):
    """Compare the runs; status, memory and time of it."""
    from pybnorm import cli

    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with open(place, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            cli.main(["compare", *folders, "--json", f"{place}.json"])
    except SystemExit as ended:
        status = ended.code
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps({"status": status, "wall": time.monotonic() - started, "peak": peak / 1024, "before": before / 1024})
    )


def _child(*arguments):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def simulate(cases, nodes, seconds, limit, folder):
    """One run.

    Returns
    -------
    dict
        Figures, and under ``wrong`` what is not as it must be.
    """
    folder = Path(folder)
    suite = folder.with_suffix(".suite")
    suite.write_text("".join(CASE.format(seed) + "\n" for seed in range(1, cases + 1)))
    names = [f"{number}-{kind}" for number, kind in enumerate(kinds(nodes))]
    dying = [n for n in names if n.endswith("dies")]
    others = [n for n in names if n not in dying]
    processes = []
    try:
        # the scheduler by itself, to have its processor time, but for a few nodes
        beside, rest = (others, []) if nodes < 20 else ([], others)
        scheduler, address = _started("serve", "", str(folder.parent), *beside, seconds=seconds)
        processes.append(scheduler)
        for some in filter(None, (dying[::2], dying[1::2], rest[::2], rest[1::2])):
            processes.append(_started("serve", address, str(folder.parent), *some, seconds=seconds)[0])
        figures = _child("collect", address, str(suite), str(folder), str(limit))
        figures["scheduler"] = _processor_seconds(scheduler.pid)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    document = json.loads((folder / "run.json").read_text())
    ideal = cases * seconds / (nodes - len(dying) - sum(not n.endswith("works") for n in others))
    return figures | {"ideal": ideal, "wrong": wrong(document, cases, names), "entries": len(document["backends"])}


def wrong(document, cases, names):
    """What of a run's document contradicts what the nodes did."""
    found = []
    seen = Counter(c["case"] for c in document["cases"])
    if set(seen) != {CASE.format(seed) for seed in range(1, cases + 1)}:
        found.append(f"{len(seen)} of {cases} cases")
    if max(seen.values()) > 1:
        found.append("a case twice")
    entries = {b["id"]: tuple(b["version"]) for b in document["backends"]}
    host = {}
    for c in document["cases"]:
        name = c["node"].removeprefix("worker ")
        if not name:
            found.append(f"{c['case']} is {c['status']}: {c['message']}")
            continue
        number, _, kind = name.partition("-")
        if c["status"] != ("FAIL" if int(c["case"].rpartition("=")[2]) % BAD == 0 else "PASS"):
            found.append(f"{c['case']} is {c['status']}")
        if entries.get(c["library"]) != (3, 1 + int(number) % 2, 0):
            found.append(f"{c['case']} on {name} is said to be of {c['library']}")
        if kind == "absent" or host.setdefault(name, c["host"]) != c["host"]:
            found.append(f"{c['case']} is said to be of {name}")
    lost = {n["node"].removeprefix("worker "): n["reason"] for n in document["lost_nodes"]}
    if set(lost) != {name for name in names if not name.endswith("works")}:
        found.append(f"taken out: {sorted(lost)}")
    if not document["complete"]:
        found.append("not complete")
    return found[:20]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.6, help="that a case takes")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds after which a node is lost")
    parser.add_argument("--compare", action="store_true", help="the run with a copy of it")
    options = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as place:
        counts = dict(Counter(kinds(options.nodes)))
        print(f"{options.cases} cases of {options.seconds:g} s, {options.nodes} nodes: {counts}")
        folder = f"{place}/a"
        found = simulate(options.cases, options.nodes, options.seconds, options.limit, folder)
        bad += found["wrong"]
        each = 1000 / options.cases
        print(
            f"run: exit status {found['status']}, {found['entries']} libraries, wrong: {found['wrong'] or 0}\n"
            f"  {found['wall']:.1f} s, ideal {found['ideal']:.1f} s ({100 * found['ideal'] / found['wall']:.0f} %),"
            f" {options.cases / found['wall']:.0f} cases/s\n"
            f"  scheduler {found['scheduler']:.1f} s of a processor ({each * found['scheduler']:.2f} ms a case,"
            f" {100 * found['scheduler'] / found['wall']:.0f} % of the time),"
            f" collecting process {found['processor']:.1f} s ({each * found['processor']:.2f} ms a case)\n"
            f"  collecting process at most {found['peak']:.0f} MiB, {found['before']:.0f} MiB before",
            flush=True,
        )
        bad += [] if found["status"] == 1 else [f"status {found['status']}"]  # some cases are made to fail
        if options.compare:
            found = _child("compare", folder, shutil.copytree(folder, f"{place}/b"), f"{place}/compare")
            bad += [] if found["status"] == 0 else [f"compare: {found['status']}"]
            print(
                f"compare: exit status {found['status']}, {found['wall']:.1f} s,"
                f" at most {found['peak']:.0f} MiB, {found['before']:.0f} MiB before"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    role, *rest = sys.argv[1:] or [""]
    if role == "serve":
        asyncio.run(_serving(rest[0], rest[2:], rest[1]))
    elif role == "collect":
        collect(rest[0], rest[1], rest[2], float(rest[3]))
    elif role == "compare":
        compared(rest[:-1], rest[-1])
    else:
        sys.exit(main())
