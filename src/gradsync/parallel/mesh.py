"""The ranks of a run in three directions: stages of a pipeline, replicas of the data, shares of a tensor.

Tensor parallelism talks most, so its ranks are neighbours; the stages of a pipeline talk least.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradsync.parallel.degrees import Degrees

_AXES = ("pipeline", "data", "tensor")


class Mesh:
    """Where this rank stands, and the groups it talks to. Collective: all ranks make the same one."""

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        self.degrees = degrees
        self.device = device
        sizes = (degrees.pipeline, degrees.data, degrees.tensor)
        self._devices = init_device_mesh(device.type, sizes, mesh_dim_names=_AXES)
        coordinate = self._devices.get_coordinate()
        assert coordinate is not None
        self.pipeline_rank, self.data_rank, self.tensor_rank = coordinate
        self.ends_group = self._make_ends_group() if degrees.pipeline > 1 else None
        """First and last stage of this rank's pipeline, None on the stages between them."""

    @property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same part of the model and see other data."""
        return self._devices["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share the matrices of one stage."""
        return self._devices["tensor"]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The stages of one replica."""
        return self._devices["pipeline"].get_group()

    @property
    def speaker(self) -> int:
        """The global rank that speaks for the first replica: it has the logits."""
        return int(self._devices.mesh[-1, 0, 0])

    def _make_ends_group(self) -> dist.ProcessGroup | None:
        ranks = self._devices.mesh
        own = None
        for replica in range(self.degrees.data):
            for share in range(self.degrees.tensor):
                ends = [int(ranks[0, replica, share]), int(ranks[-1, replica, share])]
                group = dist.new_group(ends)  # all ranks make all of them, in this order
                if dist.get_rank() in ends:
                    own = group
        return own
