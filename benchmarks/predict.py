"""The best classes of some queries among very many: time and memory of `predict`, and whether it equals brute force.

    python benchmarks/predict.py [--classes 10000000] [--queries 256] [--json FILE]

Two ranks hold bfloat16 rows of random directions; every tenth query lies near a row. Columns: seconds of one call in
which each rank asks for its share of the queries, median; MB that a rank took at most beyond what it held before the
call; seconds of brute force, which multiplies blocks of float32 unit rows with all queries, and sorts; the largest
difference of a score to brute force, and how many of the classes found are other ones (where two scores are as near as
that, either is right).
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from support.launch import available_memory, run_ranks
from support.report import table, write_json
from torch import Tensor
from torch.nn.functional import normalize

import hybridpar as hp

_BLOCK = 1 << 16


class _Memory:
    """What this process holds beyond what it held at first: looked at 200 times a second."""

    def __init__(self) -> None:
        self._first = self.peak = _held()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, _held())
            time.sleep(0.005)

    @property
    def beyond(self) -> int:
        return self.peak - self._first


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = hp.init()
    head = hp.ShardedClassifier(
        options.embedding, options.classes, dtype=torch.bfloat16, compute_dtype=getattr(torch, options.dtype),
        group=group,
    )  # fmt: skip
    head.eval()
    generator = torch.Generator().manual_seed(1)
    near = torch.randint(options.classes, (options.queries,), generator=generator)
    noise = torch.randn(options.queries, options.embedding, generator=generator)
    known = head.class_centers(near).float()
    queries = torch.where((torch.arange(options.queries) % 10 == 0)[:, None], known + 0.005 * noise, noise)
    mine = queries.tensor_split(group.size)[group.rank]
    head.predict(mine[:2], k=options.k)  # norms are measured once
    memory, seconds = _Memory(), []
    for _ in range(options.repeats):
        group.barrier()
        began = time.perf_counter()
        scores, ids = head.predict(mine, k=options.k)
        seconds.append(time.perf_counter() - began)
    beyond = memory.beyond
    began = time.perf_counter()
    expected, expected_ids = _brute_force(head, group, queries, options.k)
    brute = time.perf_counter() - began
    part = slice(*_share(options.queries, group))
    difference = float((scores - expected[part]).abs().max())
    other = float((ids != expected_ids[part]).sum())
    found = group.all_reduce(
        torch.tensor([statistics.median(seconds), float(beyond), brute, difference], dtype=torch.float64), "max"
    )
    others = group.all_reduce(torch.tensor(other, dtype=torch.float64))
    if group.rank == 0:
        write_json(options.result, [*found.tolist(), float(others)])


def _share(count: int, group: hp.Group) -> tuple[int, int]:
    sizes = [len(part) for part in torch.empty(count).tensor_split(group.size)]
    return sum(sizes[: group.rank]), sum(sizes[: group.rank + 1])


def _brute_force(head: hp.ShardedClassifier, group: hp.Group, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores [Q, k] and classes [Q, k] over all ranks."""
    unit, rows = normalize(queries), head.weight.detach()
    ids = torch.as_tensor(head.layout.class_ids(group.rank))
    best, best_ids = torch.full((len(queries), k), -torch.inf), torch.full((len(queries), k), -1)
    for begin in range(0, len(rows), _BLOCK):
        scores = unit @ normalize(rows[begin : begin + _BLOCK].float()).T
        top, places = scores.topk(min(k, scores.shape[1]), dim=1)
        best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
        best_ids = torch.cat([best_ids, ids[begin + places]], 1).gather(1, chosen)
    every = group.all_gather(best[None]).unbind()
    every_ids = group.all_gather(best_ids[None]).unbind()
    best, chosen = torch.cat(every, 1).topk(k, dim=1)
    return best, torch.cat(every_ids, 1).gather(1, chosen)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--embedding", type=int, default=512)
    parser.add_argument("--queries", type=int, default=256, help="over all ranks")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the products")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there, besides the table")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.result:
        run_as_rank(options)
        return
    needed = 2 * options.embedding * options.classes + options.ranks * 500_000_000
    if needed > available_memory():
        print(f"skipped: {needed / 1e9:.0f} GB needed, {available_memory() / 1e9:.0f} GB free; give fewer --classes")
        return
    arguments: list[str] = []
    for name in ("classes", "embedding", "queries", "k", "dtype", "repeats"):
        arguments += [f"--{name}", str(getattr(options, name))]
    found: Any = run_ranks(
        Path(__file__), arguments, ranks=options.ranks, timeout=1800, environment={"OMP_NUM_THREADS": "1"}
    )
    seconds, beyond, brute, difference, others = found
    rows = [{
        "classes": f"{options.classes:,}",
        "queries": options.queries,
        "k": options.k,
        "products": options.dtype,
        "seconds": f"{seconds:.3f}",
        "beyond MB": f"{beyond / 1e6:.0f}",
        "brute force s": f"{brute:.3f}",
        "largest difference": f"{difference:.1e}",
        "other classes": f"{others:.0f}",
    }]  # fmt: skip
    print(table(rows, text_columns=1))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
