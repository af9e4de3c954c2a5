"""What ranks on two hosts check, on every route. Started by ``tests/comm/lanes/test_network.py`` on a cluster."""

from __future__ import annotations

import sys

import torch

import hybridpar as hp
from hybridpar.comm.lanes.compose import ROUTES
from hybridpar.comm.lanes.routes import HierarchicalLane, StripedLane
from hybridpar.comm.lanes.torch_lane import TorchLane
from tests.comm.lanes.lane_contract import CHECKS

KINDS = {"auto": HierarchicalLane, "flat": TorchLane, "striped": StripedLane, "hierarchical": HierarchicalLane}


def main(interfaces: list[str]) -> None:
    torch.set_num_threads(1)
    group = hp.init(timeout=60, interfaces=interfaces)
    assert group.hosts == [[0, 1, 2], [3, 4]]
    assert (group.ranks, group.interfaces) == ((0, 1, 2, 3, 4), tuple(interfaces))
    for route in ROUTES:
        lane = group.new_lane(route)
        assert isinstance(lane, KINDS[route])
        for check in CHECKS:
            check(lane)
        big = torch.arange(300_000, dtype=torch.float64) + group.rank
        lane.all_reduce(big, "sum")  # large enough to be striped
        assert torch.equal(big, 5 * torch.arange(300_000, dtype=torch.float64) + 10)
        lane.close()
    odd = group.split([4, 2, 0]) if group.rank % 2 == 0 else group.split([1, 3])
    assert odd.hosts == ([[0], [1, 2]] if group.rank % 2 == 0 else [[0], [1]])
    gathered = odd.all_gather(torch.tensor([group.rank]))
    assert gathered.tolist() == ([4, 2, 0] if group.rank % 2 == 0 else [1, 3])
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
