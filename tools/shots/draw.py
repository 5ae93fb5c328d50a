"""Draws grafana/fragscope-engine.json into docs/dashboard.png, from a real Prometheus beside the demo.

Needs prometheus, node, npm and chromium-headless-shell or chromium. The demo runs at life's speed by default, since
only then do its clock and that of Prometheus agree: the engine dies after about five minutes.

    python -m tools.shots.draw
"""

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.shots.stack import running

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
BROWSERS = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium")

BUNDLING = (
    *("--bundle", "--format=esm", "--minify", "--jsx=automatic", "--outfile=built/page.js", "--log-level=warning"),
    *("--alias:react-custom-scrollbars-2=./scrollbars.js", '--define:process.env.NODE_ENV="production"'),
    *("--loader:.svg=text", "--loader:.woff2=empty", "--loader:.woff=empty", "--loader:.ttf=empty"),
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on loopback; yields its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def program(name: str) -> str:
    """Where a program lies."""
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


def run_here(*command: str) -> int:
    """Runs a command in this folder; its exit code."""
    return subprocess.run(command, cwd=HERE, check=False).returncode  # noqa: S603 - arguments of our own


def bundle() -> None:
    """Installs Grafana's packages (once) and bundles the page."""
    esbuild = HERE / "node_modules" / ".bin" / "esbuild"
    if not esbuild.exists() and run_here(program("npm"), "install", "--no-progress"):
        raise RuntimeError("npm could not install Grafana's packages")
    if run_here(str(esbuild), "page.tsx", *BUNDLING):
        raise RuntimeError("the page could not be bundled")


def browser() -> str:
    """The binary itself: the wrapper in /usr/bin leaves the browser behind when it is ended."""
    for path in BROWSERS:
        if Path(path).exists():
            return path
    raise RuntimeError("chromium is not installed (apt install chromium-headless-shell)")


def shoot(prometheus: str, seconds: int, rate: str, out: Path) -> int:
    """Takes the picture of the last seconds; the exit code of the browser's script."""
    asked = {
        "prometheus": prometheus,
        "dashboard": "/grafana/fragscope-engine.json",
        "seconds": str(seconds),
        "rate": rate,
    }
    with served(REPOSITORY) as address:
        page = f"{address}/tools/shots/index.html?{urllib.parse.urlencode(asked)}"
        return run_here(program("node"), "shoot.mjs", page, str(out), browser())


def main() -> int:
    """Runs the demo for a while and draws it, or draws from a Prometheus that runs already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "dashboard.png")
    parser.add_argument("--scenario", default="pseudo-oom")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster the demo's time runs")
    parser.add_argument("--seconds", type=int, default=540, help="how long to watch, and the range that is drawn")
    parser.add_argument("--rate", default="30s", help="what $__rate_interval stands for")
    parser.add_argument("--prometheus", help="draw from this one, which scrapes a demo, instead of starting both")
    asked = parser.parse_args()
    browser()
    bundle()
    out = asked.out.resolve()
    if asked.prometheus:
        return shoot(asked.prometheus, asked.seconds, asked.rate, out)
    with running(asked.scenario, asked.speed) as prometheus:
        time.sleep(asked.seconds)
        return shoot(prometheus, asked.seconds, asked.rate, out)


if __name__ == "__main__":
    sys.exit(main())
