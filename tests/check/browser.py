"""A page in a real browser: chromium, driven by chromedriver's own protocol, which needs no package.

As a program, with files as arguments: opens each as wide as a screen and as a phone, and exits with 1 if one complains
or does not fit.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage"),
]


def missing():
    """What of the browser is not on this machine."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    def __init__(self, port, folder):
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.url += "/" + self.ask("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def ask(self, path, **content):
        body = json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, file, fragment=""):
        self.ask("/url", url=Path(file).resolve().as_uri() + fragment)

    def size(self, width, height):
        self.ask("/window/rect", width=width, height=height)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def run(self, script):
        """The value of an expression; it may wait with `await`."""
        code = f"const done = arguments[0]; (async () => ({script}))().then(done, e => done('THROWN ' + e.stack))"
        return self.ask("/execute/async", script=code, args=[])

    def log(self):
        """What the page and the browser said of it, but for information."""
        return [entry["message"] for entry in self.ask("/se/log", type="browser") if entry["level"] != "INFO"]

    @contextlib.contextmanager
    def printed(self):
        """As on paper of A4, whose margins are a centimetre."""
        self.size(718, 1000)
        self.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": "print"})
        yield
        self.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": ""})


@contextlib.contextmanager
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [shutil.which("chromedriver"), "--port=0"]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        found = None
        try:
            for line in driver.stdout:
                if port := re.search(r"successfully on port (\d+)", line):
                    break
            found = Browser(port[1], folder)
            yield found
        finally:
            if found is not None:
                with contextlib.suppress(OSError):
                    request = urllib.request.Request(found.url, method="DELETE")
                    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)
            driver.terminate()
            driver.wait(30)
            driver.stdout.close()


def main(files):
    wrong = []
    with browser() as found:
        for file in files:
            for width in (1300, 390):
                found.size(width, 900)
                found.open(file)
                wrong += [f"{file}: {said}" for said in found.log()]
                if (wide := found.run("document.documentElement.scrollWidth")) > width:
                    wrong.append(f"{file}: {wide} pixels wide on a screen of {width}")
    print(f"{len(files)} pages in chromium, of which {len(wrong)} complaints", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
