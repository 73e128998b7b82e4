"""How long the first step takes where nothing is compiled yet, and in a later process; each in a process of its own.

python -m benchmarks.first_step [--workload llama-1b] [--device cuda] [--json FILE]

Both begin with the optimizer's construction, which is where kernels are compiled and checked. Importing torch and
making the model are no part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshmuon.bench.measure import circumstances, matrices, synchronize
from meshmuon.bench.workloads import GPU, QUICK
from meshmuon.muon import Muon

WORKLOADS = {**GPU, **QUICK}


def seconds_of_steps(workload: str, device: str) -> dict[str, float]:
    """Construction with a first step, and a second step, in seconds. For a process that has done nothing before."""
    params = matrices(WORKLOADS[workload], device)
    synchronize(device)
    start = time.perf_counter()
    optimizer = Muon(params)
    optimizer.step()
    synchronize(device)
    first = time.perf_counter()
    optimizer.step()
    synchronize(device)
    return {"first s": first - start, "second s": time.perf_counter() - first}


def in_new_process(workload: str, device: str, *, cache: str) -> dict[str, float]:
    """The same in a process that keeps what it compiles in a folder."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--inside", "--workload", workload, "--device", device]
    # torch's compiler has a cache too, and so has the driver.
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "driver"}
    environment = {**os.environ, **{name: str(Path(cache) / folder) for name, folder in folders.items()}}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="llama-1b", choices=list(WORKLOADS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(seconds_of_steps(arguments.workload, arguments.device)))
        return
    with tempfile.TemporaryDirectory() as cache:
        results = {
            name: in_new_process(arguments.workload, arguments.device, cache=cache)
            for name in ("empty cache", "later process")
        }
    for name, row in results.items():
        print(f"{arguments.workload}, {name}: first step {row['first s']:.2f} s, second {row['second s']:.3f} s")
    if arguments.json:
        record = {**circumstances(arguments.device), "workload": arguments.workload, "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
