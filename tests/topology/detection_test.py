"""Detection: CPUs, GPUs as nvidia-smi reports them, logical GPUs, and what cannot be known."""

import importlib
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import types
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized

import tfcdo
from tfcdo import log, topology
from tfcdo.topology import detection

# Four GPUs, wired so that no two pairs of GPUs are alike.
_TABLE = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV1\tNV2\tNV3\tPHB\t0-15\t0\t\tN/A
GPU1\tNV1\t X \tNV4\tNV5\tPHB\t0-15\t0\t\tN/A
GPU2\tNV2\tNV4\t X \tNV6\tSYS\t16-31\t1\t\tN/A
GPU3\tNV3\tNV5\tNV6\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPHB\tPHB\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_SLEEP = shutil.which("sleep") or "sleep"
_UUIDS = "GPU-aaaa-0, 0\nGPU-aabb-1, 1\nGPU-bbbb-2, 2\nGPU-cccc-3, 3\n"


class DetectTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(mock.patch.dict(os.environ, PATH=str(self.folder)))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        # Where another test of this process has imported TensorFlow, its devices must not count.
        self.enter_context(mock.patch.dict(sys.modules, {"tensorflow": None}))
        # A module that is loaded again remembers nothing, as in a new process.
        for module in (log, detection):
            importlib.reload(module)

    def fake_nvidia_smi(
        self, before: str = "", uuids: str = _UUIDS, visible: str | None = None
    ) -> None:
        """Puts a nvidia-smi on the PATH that counts its calls in the file `calls`."""
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        program = self.folder / "nvidia-smi"
        program.write_text(
            f"""#!/bin/sh
            printf x >> {shlex.quote(str(self.folder / "calls"))}
            {before}
            case "$*" in
            "topo -m") printf %s {shlex.quote(_TABLE)};;
            "--query-gpu=uuid,index --format=csv,noheader") printf %s {shlex.quote(uuids)};;
            *) echo "unexpected: $*"; exit 1;;
            esac"""
        )
        program.chmod(0o755)

    def detect(self, *devices: str) -> tuple[topology.Topology, list[str]]:
        with self.assertLogs("absl", "INFO") as logs:
            found = detection.detect(devices)
        self.assertEqual(found.num_devices, len(devices))
        return found, [record.getMessage() for record in logs.records]

    def assert_all_to_all(self, message: str, *devices: str) -> None:
        """Checks that devices are taken as joined all to all, and what is said about that."""
        found, lines = self.detect(*devices)
        self.assertEqual(found, topology.preset("fully_connected", found.num_devices))
        self.assertRegex(lines[-1], f"{message}.*; pass topology=")

    def assert_nvlinks(self, gpus: Any, wanted: dict[tuple[int, int], int]) -> None:
        found, (line,) = self.detect(*(f"GPU:{gpu}" for gpu in gpus))
        self.assertEqual({pair: found.bandwidth(*pair) / 25e9 for pair in wanted}, wanted)
        self.assertIn("as nvidia-smi reports", line)

    def test_cpus_share_memory(self):
        names = "/job:localhost/replica:0/task:0/device:CPU:0", "/cpu:1", "CPU:2"
        found, (line,) = self.detect(*names)
        self.assertEqual(found, topology.preset("shared_memory", 3))
        self.assertRegex(line, "'shared_memory'.*CPU devices")
        with self.tensorflow_with("CPU:0"):  # An unknown device is a CPU if there is nothing else.
            self.assertEqual(self.detect("", "CPU:1")[0], topology.preset("shared_memory", 2))

    @parameterized.parameters(
        *(("GPU:0", "CPU:0"), ("", "GPU:0"), ("TPU:0", "TPU:1"), ("nonsense", "CPU:0")),
        ("/job:worker/task:0/device:GPU:0", "/job:worker/task:1/device:GPU:0"),
        ("/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"),
    )
    def test_anything_else_is_taken_as_joined_all_to_all(self, *devices: str):
        self.fake_nvidia_smi()
        self.assert_all_to_all("these are not the CPUs of one host, nor its GPUs", *devices)

    @parameterized.parameters(
        ([], "be .* at least one device"),
        ("/cpu:0", "be .* at least one device"),
        (["/cpu:0", None], "be a device name .* got None"),
    )
    def test_no_devices(self, devices: Any, message: str):
        self.assertRaisesRegex(ValueError, f"devices must {message}", detection.detect, devices)

    @parameterized.parameters(
        (None, range(4), {(0, 1): 1, (0, 2): 2, (0, 3): 3, (1, 2): 4, (1, 3): 5, (3, 2): 6}),
        # In the order of the devices, numbered as the visible GPUs.
        (None, (3, 1, 0), {(0, 1): 5, (0, 2): 3, (2, 1): 1}),
        ("3,1,0", range(3), {(0, 1): 5, (0, 2): 3}),
        (" 2, 3 ,1", range(3), {(0, 1): 6, (0, 2): 4}),
        ("GPU-bbbb,GPU-aaaa-0,3", range(3), {(0, 1): 2, (0, 2): 6}),
    )
    def test_gpus_are_joined_as_nvidia_smi_reports(self, visible, gpus, wanted):
        self.fake_nvidia_smi(visible=visible)
        self.assert_nvlinks(gpus, wanted)

    @parameterized.parameters(
        *(
            (visible, "", _UUIDS, "CUDA_VISIBLE_DEVICES")
            for visible in ("", "0,-1,1", "MIG-1234,0", "0,4", "0,GPU-aa,1", "0,GPU-dddd")
        ),
        ("GPU-a,GPU-b", "", "No devices were found", "printed 'No devices were found'"),
        ("GPU-a,GPU-b", "", "GPU-aaaa-0, N/A", "printed 'GPU-aaaa-0, N/A'"),
        (None, "echo driver is not loaded; exit 9", "", "status 9: driver is not loaded"),
        (None, "echo hello; exit", "", "no table of `nvidia-smi topo -m`"),
        (None, f"exec {_SLEEP} 60", "", "did not answer within 0.1 s"),
        (None, None, "", "no nvidia-smi on the PATH"),
    )
    def test_what_joins_gpus_is_not_known(
        self, visible: str | None, before: str | None, uuids: str, message: str
    ):
        if before is not None:
            self.fake_nvidia_smi(before, uuids, visible)
        limit = 0.1 if _SLEEP in (before or "") else 10.0
        with mock.patch.object(detection, "_TIMEOUT_SECONDS", limit):
            self.assert_all_to_all(message, "GPU:0", "GPU:1")

    def test_the_gpus_of_the_driver(self):
        self.assertEqual(detection.gpus_of_nvidia_smi(), ())
        self.fake_nvidia_smi("echo Model A; echo Model B; exit")
        self.assertEqual(detection.gpus_of_nvidia_smi(), ("Model A", "Model B"))

    def test_runs_nvidia_smi_and_logs_once(self):
        self.fake_nvidia_smi()
        first, _ = self.detect("GPU:0", "GPU:1")
        with self.assertNoLogs("absl", "INFO"):
            self.assertIs(detection.detect(["GPU:0", "GPU:1"]), first)
        self.detect("GPU:2", "GPU:1")
        self.assertEqual((self.folder / "calls").read_text(), "x")

    def tensorflow_with(self, *names: str, cut_in_two: str = "none") -> Any:
        devices = [
            types.SimpleNamespace(name=f"/physical_device:{name}", device_type=name[:3])
            for name in names
        ]
        config = types.SimpleNamespace(
            get_visible_devices=lambda kind="": [one for one in devices if kind in one.name],
            get_logical_device_configuration=lambda one: 2 * [one] * one.name.endswith(cut_in_two),
        )
        tensorflow = types.SimpleNamespace(config=config)
        return mock.patch.dict(sys.modules, {"tensorflow": tensorflow})

    def test_gpus_as_tensorflow_shows_them(self):
        self.fake_nvidia_smi()
        with self.tensorflow_with("CPU:0", "GPU:3", "GPU:1"):
            self.assert_nvlinks((0, 1), {(0, 1): 5})
        with self.tensorflow_with("CPU:0", "GPU:1", "GPU:3", cut_in_two="GPU:1"):
            self.assert_all_to_all("several of these .* are one GPU", "GPU:0", "GPU:1", "GPU:2")
            found, (line,) = self.detect("GPU:1", "GPU:0")
            self.assertEqual(found, topology.preset("shared_memory", 2))
            self.assertIn("logical devices of one GPU", line)


class NamesTest(absltest.TestCase):
    def test_every_public_name_is_listed(self):
        with self.assertRaisesRegex(AttributeError, "attribute.*NoSuchReduce"):
            tfcdo.NoSuchReduce  # type: ignore[attr-defined]  # noqa: B018
        self.assertContainsSubset(tfcdo.__all__, dir(tfcdo))
        source = pathlib.Path(tfcdo.__file__).read_text(encoding="utf-8")
        homes = re.findall(r"^    from tfcdo\.?(\S*) import (\w+) as \2$", source, re.MULTILINE)
        known = {**tfcdo._MODULES, **dict.fromkeys(tfcdo._PACKAGES, "")}
        self.assertEqual(known, {name: module for module, name in homes})
        for name in tfcdo.__all__:
            self.assertIsNotNone(getattr(tfcdo, name))


if __name__ == "__main__":
    absltest.main()
