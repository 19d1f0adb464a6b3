"""The site's build runs what pages show: ``{shell}`` commands, ``{example}`` files, Python blocks that print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import pybnorm

LOGGER = logging.getLogger(__name__)
SOURCE = Path(__file__).parents[1]
INSTALLED = Path(pybnorm.__file__).parents[1]
TORCH = ("pytorch", "exporting")  # pages whose blocks ``py`` need PyTorch; those of others need files
# The same operation under several names: each names the others under See Also.
TWINS = {
    "forward_training": """pybnorm.functional.batch_norm_training pybnorm.Handle.forward_training
        pybnorm.Handle.plan_forward_training pybnorm.batch_normalization_forward_training
        pybnorm.operations.forward_training pybnorm.miopen.batch_normalization_forward_training
        pybnorm.cupy.batch_normalization_forward_training pybnorm.directml.batch_normalization_training
        pybnorm.reference.forward_training pybnorm.torch.batch_norm""",
    "forward_inference": """pybnorm.functional.batch_norm_inference pybnorm.Handle.forward_inference
        pybnorm.Handle.plan_forward_inference pybnorm.batch_normalization_forward_inference
        pybnorm.operations.forward_inference pybnorm.miopen.batch_normalization_forward_inference
        pybnorm.cupy.batch_normalization_forward_inference pybnorm.directml.batch_normalization
        pybnorm.reference.forward_inference""",
    "backward": """pybnorm.functional.batch_norm_backward pybnorm.Handle.backward pybnorm.Handle.plan_backward
        pybnorm.batch_normalization_backward pybnorm.operations.backward pybnorm.miopen.batch_normalization_backward
        pybnorm.cupy.batch_normalization_backward pybnorm.directml.batch_normalization_training_grad
        pybnorm.reference.backward""",
    "backward_frozen": """pybnorm.operations.backward_frozen pybnorm.directml.batch_normalization_grad
        pybnorm.reference.backward_frozen""",
    "stats": "pybnorm.operations.stats pybnorm.cann.stats pybnorm.reference.stats",
    "gather_stats": """pybnorm.operations.gather_stats pybnorm.cann.gather_stats_with_counts
        pybnorm.reference.gather_stats""",
    "elemt": "pybnorm.operations.elemt pybnorm.cann.elemt pybnorm.reference.elemt",
    "backward_reduce": """pybnorm.operations.backward_reduce pybnorm.cann.reduce_backward
        pybnorm.reference.backward_reduce""",
    "backward_elemt": """pybnorm.operations.backward_elemt pybnorm.cann.elemt_backward
        pybnorm.reference.backward_elemt""",
    "derive": """pybnorm.derive_bn_tensor_descriptor pybnorm.operations.derive
        pybnorm.miopen.derive_bn_tensor_descriptor""",
    "fold": "pybnorm.operations.fold pybnorm.reference.fold",
    "elementwise": "pybnorm.axpby pybnorm.fill pybnorm.relu pybnorm.relu_backward",
    "torch": """pybnorm.torch.install pybnorm.torch.convert pybnorm.torch.unconvert pybnorm.torch.batch_norm
        pybnorm.torch.BatchNorm2d pybnorm.torch.SyncBatchNorm""",
    "synchronized": "pybnorm.sync.SyncBatchNorm pybnorm.torch.SyncBatchNorm",
    "questions": "pybnorm.capability pybnorm.algorithms pybnorm.known_defects pybnorm.backends pybnorm.loaded",
    "judge": "pybnorm.check.arguments pybnorm.check.judge pybnorm.check.run_case pybnorm.check.which_convention",
}


def ran(command: list[str] | str, folder: str | Path) -> subprocess.CompletedProcess[str]:
    """A command, as in a terminal of 100 columns where pybnorm's commands are found."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": found, "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    shell = isinstance(command, str)
    return subprocess.run(
        command, shell=shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def literal(text: str, language: str) -> nodes.literal_block:
    """A block of a page that `execute` leaves alone."""
    return nodes.literal_block(text, text, language=language, classes=["shown"])


class Shell(SphinxDirective):
    """``{shell} PAGE``: commands, what they print, and a link to the PAGE that they write, if any.

    Exit statuses of 0 and 1, a verdict, are a success.
    """

    has_content = True
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The commands one after another, in one empty folder beside the examples."""
        shown = []
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "examples").symlink_to(SOURCE / "examples")
            for command in self.content:
                done = ran(command, folder)
                if done.returncode not in (0, 1):
                    raise self.error(f"{command}: exit status {done.returncode}\n{done.stderr}")
                said = done.stdout.strip("\n").replace(f"{folder}/", "").replace(f"{INSTALLED}/", "")
                shown.append(f"$ {command}\n{said}\n")
            made: list[nodes.Node] = [literal("\n".join(shown), "console")]
            for page in self.arguments:
                target = Path(self.env.app.outdir, "_shown", page)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(folder, page), target)
                link = nodes.reference("", f"The page {page}", refuri=f"_shown/{page}")
                made.append(nodes.paragraph("", "", link, nodes.Text(" that this wrote.")))
        return made


class Example(SphinxDirective):
    """``{example} FILE``: a file of examples/ and what it prints; where a package of it is missing, the file alone."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The file and its output."""
        file = Path(__file__).parent / self.arguments[0]
        self.env.note_dependency(str(file))
        shown: list[nodes.Node] = [literal(file.read_text(encoding="utf-8"), "python")]
        done = ran([sys.executable, str(file)], SOURCE)
        if not done.returncode:
            shown.append(literal(done.stdout, "text"))
        elif not re.search("^(ModuleNotFound|Import|Runtime)Error", done.stderr, re.MULTILINE):
            raise self.error(done.stderr)
        return shown


def execute(app: Any, document: nodes.document) -> None:
    """Run a page's Python blocks one after another, and show below each one what it prints."""
    languages = ("python", "py") if app.env.docname in TORCH else ("python",)
    if "/" in app.env.docname:
        return
    names: dict[str, Any] = {}
    for block in list(document.findall(nodes.literal_block)):
        if block.get("language") not in languages or "shown" in block["classes"]:
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.astext(), app.env.docname, "exec", dont_inherit=True), names)
        except (ImportError, pybnorm.LibraryNotFoundError):
            return  # a package or library that is not here
        except Exception as wrong:
            LOGGER.warning("the block raises %r", wrong, location=block)
            return
        if printed.getvalue():
            block.parent.insert(block.parent.index(block) + 1, literal(printed.getvalue(), "text"))


def see_also(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Name the twins of a callable at the end of its docstring, before numpydoc reads it."""
    others = [other for twins in TWINS.values() if name in twins.split() for other in twins.split() if other != name]
    if others and not any(line == "See Also" for line in lines):
        lines += ["", "See Also", "--------", *others]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("shell", Shell)
    app.add_directive("example", Example)
    app.connect("doctree-read", execute)
    app.connect("autodoc-process-docstring", see_also, priority=400)
    return {"parallel_read_safe": True}
