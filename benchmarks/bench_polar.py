"""Polar factors alone beside torch.optim.Muon's, against the matmul rate and copy bandwidth of the same run.

python -m benchmarks.bench_polar [--device cuda] [--only 4096] [--repeats 7] [--json FILE]
"""

from __future__ import annotations

from benchmarks.bench_step import main
from meshmuon.bench.polar import run_polar

if __name__ == "__main__":
    main(run_polar, repeats=7, about=__doc__)
