"""The logging configuration for vLLM, loaded by Python's own dictConfig as vLLM and uvicorn do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.paths import REPOSITORY

CONFIG = REPOSITORY / "deploy" / "kubernetes" / "logs" / "logging.json"
LIMIT_BYTES = 128 * 2**20

WRITER = """
import json, logging, logging.config, sys
logging.config.dictConfig(json.load(open(sys.argv[1])))
for i in range(int(sys.argv[2])):
    logging.getLogger("vllm.v1.engine.core").error("line %d %s", i, "x" * 1000)
logging.getLogger("uvicorn.error").info("a server's line")
logging.getLogger("uvicorn.access").info("a request")
"""


def config_in(folder: Path) -> Path:
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    assert config["handlers"]["file"]["filename"] == "/var/log/vllm/vllm.log"
    config["handlers"]["file"]["filename"] = str(folder / "vllm.log")
    path = folder / "logging.json"
    path.write_text(json.dumps(config))
    return path


def writing(config: Path, lines: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(config), str(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_console_shows_what_it_did_and_the_file_gets_the_engine_but_no_requests(tmp_path: Path) -> None:
    out, err = writing(config_in(tmp_path), 1).communicate(timeout=30)
    assert err == ""
    assert [word in out for word in ("line 0", "a server's line", "a request")] == [True, True, True]
    written = (tmp_path / "vllm.log").read_text()
    assert [word in written for word in ("line 0", "a server's line", "a request")] == [True, True, False]
    assert (tmp_path / "vllm.log").stat().st_mode & 0o044 == 0o044, "readable for another user"


def test_several_processes_stay_far_below_the_volumes_limit(tmp_path: Path) -> None:
    """Each process of vLLM rotates on its own: lines may be lost at a rotation, the volume never fills up."""
    config = config_in(tmp_path)
    processes = [writing(config, 15_000) for _ in range(4)]
    results = [process.communicate(timeout=120) for process in processes]
    assert {process.returncode for process in processes} == {0}
    assert sum(len(out) for out, _ in results) > 50e6
    size = sum(path.stat().st_size for path in tmp_path.glob("vllm.log*"))
    assert size < LIMIT_BYTES / 4
