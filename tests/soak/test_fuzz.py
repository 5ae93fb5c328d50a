"""Mutated pages, log lines and recordings never raise: twenty seconds in the suite, ten minutes by hand."""

import gzip
import json
import random
import time

from fragscope.detect.parameters import Parameters
from fragscope.explain.postmortem import PostMortem, evidence_of
from fragscope.recording import Tally, parse_line
from fragscope.replay import Replayer
from fragscope.sources.exposition import Page, Parser
from fragscope.sources.scrape import Body
from fragscope.sources.vllm import read, wanted
from tests.paths import OOM_CASES, VLLM_032

INTERESTING = [
    b"{",
    b"}",
    b'"',
    b"\\",
    b",",
    b"=",
    b"\n",
    b"NaN",
    b"+Inf",
    b"-1",
    b"1e400",
    b"\x00",
    b"\xff",
    b"#",
    b" ",
]


def seeds() -> list[bytes]:
    with gzip.open(VLLM_032 / "oom_crash_restart_log.jsonl.gz") as stream:
        lines = stream.read().splitlines()
    return lines[:40] + [line for line in lines if b"out of memory" in line]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.random()
        if kind < 0.4:
            data[at : at + rng.randint(0, 20)] = rng.choice(INTERESTING)
        elif kind < 0.7:
            del data[at : at + rng.randint(1, 200)]
        else:
            piece = data[at : at + rng.randint(1, 400)]
            data[at:at] = piece
    return bytes(data)


def test_no_mutation_raises(soak_s: float) -> None:
    rng = random.Random(20261130)
    lines, parser = seeds(), Parser(wanted)
    texts = [text for line in lines if (text := json.loads(line).get("text"))]
    deadline, tried = time.monotonic() + soak_s, 0
    while time.monotonic() < deadline:
        replayer = Replayer()
        for _ in range(20):
            raw = mutated(rng.choice(lines), rng)
            line = parse_line(raw, Tally())
            if line is not None:
                list(replayer.feed(line))
            page = parser.parse(Body(mutated(rng.choice(texts).encode(), rng).decode("utf-8", "replace"), ""))
            if isinstance(page, Page):
                read(page, 1.0, 200)
            tried += 1
        list(replayer.finish())
    print(f"{tried} mutations")
    assert tried > 100


def test_no_mutated_log_raises(soak_s: float) -> None:
    rng = random.Random(20261201)
    logs = [json.loads(path.read_text())["excerpt"].encode() for path in sorted(OOM_CASES.glob("*.json"))]
    deadline, tried, found = time.monotonic() + soak_s, 0, 0
    while time.monotonic() < deadline:
        mortem = PostMortem(Parameters())
        for _ in range(5):
            for line in mutated(rng.choice(logs), rng).decode("utf-8", "replace").split("\n"):
                for explanation in mortem.feed(line):
                    found += bool(evidence_of(explanation))
            tried += 1
        for explanation in mortem.close():
            assert 0.99 < sum(explanation.judged.probabilities.values()) < 1.01
            found += bool(explanation.sentence)
    print(f"{tried} mutated logs, {found} incidents")
    assert found > 20
