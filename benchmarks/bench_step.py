"""Step time beside torch.optim.Muon and fused AdamW, measured in one run; on a GPU also against the hardware's floor.

python -m benchmarks.bench_step [--device cuda] [--only llama-1b] [--repeats 9] [--json FILE]

The measuring is `meshmuon.bench.steps`; `meshmuon bench step` is the same for an installed package.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshmuon.bench.measure import circumstances
from meshmuon.bench.steps import run_steps


def main(run: Callable[..., dict[str, Any]] = run_steps, *, repeats: int = 9, about: str = __doc__) -> None:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds of each")
    parser.add_argument("--quick", action="store_true", help="the least there is")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    results = run(
        arguments.device,
        say=functools.partial(print, flush=True),
        only=arguments.only,
        repeats=arguments.repeats,
        size="quick" if arguments.quick else "small" if arguments.device == "cpu" else "full",
    )
    if arguments.json:
        record = {**circumstances(arguments.device), "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
