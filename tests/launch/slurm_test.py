"""`tfcdo launch --slurm`: Slurm's variables, and a fake `scontrol`."""

from __future__ import annotations

import os
from unittest import mock

from absl.testing import absltest, parameterized
from launch_testing import LaunchTestCase

from tfcdo.cli import launch
from tfcdo.cluster.config import tf_config

_SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


class SlurmTest(LaunchTestCase):
    def slurm_variables(self, rank: int, **changed: str) -> dict[str, str]:
        (self.folder / "scontrol").write_text(_SCONTROL)
        (self.folder / "scontrol").chmod(0o755)
        return {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "1262",
            "SLURM_STEP_ID": "1",
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // 2),
            "SLURM_LOCALID": str(rank % 2),
            **changed,
        }

    def test_each_task_is_a_worker_with_its_gpus(self):
        addresses = ("node1:10208", "node1:10209", "node2:10208", "node2:10209")
        for rank in range(4):
            variables = self.slurm_variables(rank, CUDA_VISIBLE_DEVICES="4,5")
            found, _ = self.variables("--slurm", **variables)
            gpu = {"CUDA_VISIBLE_DEVICES": str(4 + rank % 2)}
            expected = {f"worker {rank}": {"TF_CONFIG": tf_config(addresses, rank), **gpu}}
            self.assertEqual(expected, found)

    def test_gpus_that_slurm_has_bound_stay(self):
        variables = self.slurm_variables(1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="2")
        found, _ = self.variables("--slurm", **variables)
        self.assertNotIn("CUDA_VISIBLE_DEVICES", found["worker 1"])

    def test_unequal_nodes(self):
        changed = {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        with mock.patch.dict(os.environ, self.slurm_variables(3, **changed)):
            place = launch.place_in_slurm(os.environ)
        self.assertEqual(place.addresses[2:], ("node1:10210", "node2:10208"))
        self.assertEqual((place.own, place.first_here, place.here), (range(3, 4), 0, 1))

    @parameterized.parameters(
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID to a number; got 'x'"),
        ({"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "use srun --distribution=block"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "of node 1 of \\['node1', 'node2'\\]"),
        ({"SLURM_STEP_NODELIST": "other"}, "show hostnames other` has named no host"),
    )
    def test_another_place_is_refused(self, changed: dict[str, str], message: str):
        with mock.patch.dict(os.environ, self.slurm_variables(2, **changed)):
            self.assertRaisesRegex(ValueError, message, launch.place_in_slurm, os.environ)


if __name__ == "__main__":
    absltest.main()
