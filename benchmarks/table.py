"""The README's speed table, from results/h200-step.json.

python -m benchmarks.table
"""

from __future__ import annotations

import json
from pathlib import Path

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
    lines = [f"| workload | {' | '.join(COLUMNS.values())} | x floor | x torch | extra memory |", f"|{'---|' * 8}"]
    for name, row in results.items():
        if "optimizers" not in row:
            continue
        times = {key: row["optimizers"][key]["ms"] for key in COLUMNS}
        ours = row["optimizers"]["meshmuon.Muon"]
        cells = " | ".join(f"{value:.1f} ms" for value in times.values())
        floor, torchs = ours["ms"] / row["floor ms"], times["torch.optim.Muon"] / ours["ms"]
        lines.append(f"| {name} | {cells} | {floor:.2f} | {torchs:.1f} | {ours['extra GB']:.2f} GB |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
