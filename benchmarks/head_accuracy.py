"""What samplers and low precision of the head cost in accuracy: the recipe's presets, verified on unseen identities.

    python benchmarks/head_accuracy.py [--presets glyphs characters] [--records FOLDER] [--epochs 8] [--seeds 0 1 2]

Each case is a run of `torchrun -m recipes.insightface.train` on two ranks, with gradients that are not clipped, because
rows that step in the backward pass cannot be. The preset characters trains on `--records`, a record set of gray
characters. Columns: accuracy of verification in percent, mean over seeds and the least and largest; the difference of
the mean to the exact head's; mean seconds of a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.report import table, write_json

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipes.common.metrics import read_metrics  # noqa: E402  (the line above finds it)

_ROWS = ["--head.optimizer", "sgd"]
_HALF = [*_ROWS, "--head.dtype", "bfloat16", "--head.state", "bfloat16"]
CASES: dict[str, list[str]] = {
    "exact": [],
    "exact, rows step in backward": _ROWS,
    "uniform 0.3": ["--head.sample-rate", "0.3"],
    "uniform 0.1": ["--head.sample-rate", "0.1"],
    "hard 0.1": ["--head.sample-rate", "0.1", "--head.hard-share", "0.5", "--head.graph-every", "100"],
    "bf16 rows": _HALF,
    "bf16 rows, to nearest": [*_HALF, "--head.no-stochastic-rounding"],
    "bf16 rows, uniform 0.1": [*_HALF, "--head.sample-rate", "0.1"],
}


def run(preset: str, case: str, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Accuracy in percent, the mean over all sets of pairs, and seconds of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "recipes.insightface.train", preset, "--run.out", folder, "--run.quiet", "--run.no-tensorboard",
            "--run.no-export", "--optimizer.clip", "0", "--seed", str(seed), "--run.evaluate-every", "1000000",
            "--run.checkpoint-every", "1000000", "--epochs", str(options.epochs * (4 if preset == "characters" else 1)),
            *(["--data.path", str(options.records)] if preset == "characters" else []),
            *(["--data.bins", *map(str, options.records.glob("*.bin"))] if preset == "characters" else []),
            *CASES[case],
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{preset}, {case}, seed {seed} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        records = [record for record in read_metrics(Path(folder)) if any(k.startswith("accuracy/") for k in record)]
        return 100 * statistics.mean(v for k, v in records[-1].items() if k.startswith("accuracy/")), seconds


def rows_of(found: dict[tuple[str, str], list[tuple[float, float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (preset, case), results in found.items():
        accuracies = [accuracy for accuracy, _ in results]
        exact = [accuracy for accuracy, _ in found.get((preset, "exact"), [])]
        difference = f"{statistics.mean(accuracies) - statistics.mean(exact):+.2f}" if exact else ""
        rows.append({
            "data": preset,
            "case": case,
            "accuracy %": f"{statistics.mean(accuracies):.2f}",
            "least": f"{min(accuracies):.2f}",
            "largest": f"{max(accuracies):.2f}",
            "to exact": difference,
            "s a run": f"{statistics.mean(seconds for _, seconds in results):.0f}",
        })  # fmt: skip
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=8.0, help="of glyphs; of characters four times as many")
    parser.add_argument("--presets", nargs="+", choices=["glyphs", "characters"], default=["glyphs"])
    parser.add_argument("--records", type=Path, help="of characters: folder of a record set with a .bin of pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there, besides the table")
    options = parser.parse_args()
    if "characters" in options.presets and options.records is None:
        parser.error("--presets characters: expected --records, the folder of a record set, got none")
    return options


def main() -> None:
    options = parse()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for preset in options.presets:
        for seed in options.seeds:
            for case in options.cases:
                found.setdefault((preset, case), []).append(run(preset, case, seed, options))
                print(f"{preset}, {case}, seed {seed}: {found[preset, case][-1][0]:.2f} %", file=sys.stderr)
            if options.json:
                write_json(options.json, [[*key, *value] for key, value in found.items()])
    print(table(rows_of(found), text_columns=2))


if __name__ == "__main__":
    main()
