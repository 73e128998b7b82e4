"""The README's speed table, from results/h200-step.json.

python -m benchmarks.table
"""

from __future__ import annotations

import json
from pathlib import Path

from meshmuon.bench.workloads import GPU, Ceilings, floor_ms

RESULTS = Path(__file__).with_name("results") / "h200-step.json"
COLUMNS = {
    "meshmuon.Muon": "Muon",
    "meshmuon.Muon (CUDA graph)": "as a CUDA graph",
    "torch.optim.Muon": "torch.optim.Muon",
    "torch.optim.AdamW (fused)": "fused AdamW",
}


def table() -> str:
    """One row per workload: milliseconds, how far from the floor, how much faster than torch, and memory."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    ceilings = results["ceilings"]
    sustained = Ceilings(ceilings["sustained"]["bfloat16"], ceilings["bandwidth"])
    titles = [*COLUMNS.values(), "x floor", "x floor, sustained", "x torch", "extra memory"]
    lines = [f"| workload | {' | '.join(titles)} |", f"|{'---|' * (len(titles) + 1)}"]
    for name, row in results.items():
        if "optimizers" not in row:
            continue
        times = {key: row["optimizers"][key]["ms"] for key in COLUMNS}
        ours = row["optimizers"]["meshmuon.Muon"]
        floors = [ours["ms"] / floor for floor in (row["floor ms"], floor_ms(GPU[name], sustained))]
        cells = [f"{value:.1f} ms" for value in times.values()] + [f"{floor:.2f}" for floor in floors]
        cells += [f"{times['torch.optim.Muon'] / ours['ms']:.1f}", f"{ours['extra GB']:.2f} GB"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
