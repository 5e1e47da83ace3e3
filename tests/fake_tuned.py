"""Stands in for the program that measures configurations on a GPU: ``tuner/gpu/measure.mojo``.

Configurations take ten microseconds times a number of the environment's; others misbehave. What it
is asked stands in the file ``asked`` beside it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

FAULTS: dict[str, str] = json.loads(os.environ.get("FAKE_FAULTS", "{}"))
TIMES: dict[str, float] = json.loads(os.environ.get("FAKE_TIMES", "{}"))
LOG = Path(os.environ["FAKE_LOG"])


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def misbehave(fault: str, graphs: list[float]) -> None:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(60)
    if fault == "lost":
        say(error="CUDA: an illegal address")
    if fault == "refused":
        say(refusal="too large")
    if fault == "wrong":
        say(wrong=3, elements=9)
    if fault == "error":
        say(error="no memory")


def main() -> None:
    if "start" in FAULTS:
        say(error="no GPU")
        return
    say(device="a fake", units=132, configurations=9)
    graphs: list[float] = []
    for line in sys.stdin:
        with LOG.open("a") as log:
            log.write(line)
        words = line.split()
        if words[0] == "problem":
            graphs = []
            fault = FAULTS.get(" ".join(words))
            if fault:
                misbehave(fault, graphs)
            else:
                say()
        elif words[0] == "choose":
            say(index=0, split_k=1, seconds=1e-5)
        elif words[0] == "load":
            say(loaded=int(words[1]))
        elif words[0] == "prepare":
            fault = FAULTS.get(words[1])
            if fault:
                misbehave(fault, graphs)
                continue
            graphs.append(1e4 * TIMES.get(words[1], 1.0) * int(words[4]))
            say(graph=len(graphs) - 1)
        elif words[0] == "replay":
            say(ns=int(graphs[int(words[1])] * int(words[2])))


main()
