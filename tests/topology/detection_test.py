"""Detection: CPUs, GPUs as nvidia-smi reports them, logical GPUs, and what cannot be known."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import warm_python
from absl.testing import absltest, parameterized

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
_NVLINK = 25e9
_UUIDS = "GPU-aaaa-0, 0\nGPU-aabb-1, 1\nGPU-bbbb-2, 2\nGPU-cccc-3, 3\n"


class DetectTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = {"PATH": str(self.folder), "TFCDO_CACHE_DIR": str(self.folder)}
        stack.enter_context(mock.patch.dict(os.environ, places))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        # Where another test of this process has imported TensorFlow, its devices must not count.
        stack.enter_context(mock.patch.dict(sys.modules, {"tensorflow": None}))
        # A module that is loaded again remembers nothing, as in a new process.
        for module in (log, detection):
            importlib.reload(module)

    def fake_nvidia_smi(self, topo: str = _TABLE, before: str = "", uuids: str = _UUIDS) -> None:
        """Puts a nvidia-smi on the PATH that counts its calls in the file `calls`."""
        program = self.folder / "nvidia-smi"
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys, pathlib, time\n"
            f"with open({str(self.folder / 'calls')!r}, 'a') as calls: calls.write('x')\n"
            f"{before}\n"
            "if sys.argv[1:] == ['topo', '-m']:\n"
            f"    print({topo!r})\n"
            "elif sys.argv[1:] == ['--query-gpu=uuid,index', '--format=csv,noheader']:\n"
            f"    print({uuids!r}, end='')\n"
            "else:\n"
            "    sys.exit('unexpected: ' + ' '.join(sys.argv))\n"
        )
        program.chmod(0o755)

    def detect(self, *devices: str) -> tuple[topology.Topology, list[str]]:
        """Returns what is detected, and the lines that are logged."""
        found = None
        with self.assertLogs("absl", "INFO") as logs:
            found = detection.detect(devices)
        self.assertEqual(found.num_devices, len(devices))
        return found, [record.getMessage() for record in logs.records]

    def assert_nvlinks(self, found: topology.Topology, wanted: dict[tuple[int, int], int]) -> None:
        self.assertEqual(
            {pair: found.bandwidth(*pair) for pair in wanted},
            {pair: count * _NVLINK for pair, count in wanted.items()},
        )

    @parameterized.parameters("/job:localhost/replica:0/task:0/device:CPU:{}", "/cpu:{}", "CPU:{}")
    def test_cpus_share_memory(self, name: str):
        found, (line,) = self.detect(*(name.format(index) for index in range(3)))
        self.assertEqual(found, topology.preset("shared_memory", 3))
        self.assertIn("'shared_memory'", line)
        self.assertIn("CPU devices", line)

    @parameterized.parameters(
        (("GPU:0", "CPU:0"),),
        (("", ""),),
        (("", "GPU:0"),),
        (("TPU:0", "TPU:1"),),
        (("nonsense", "CPU:0"),),
        (("/job:worker/task:0/device:GPU:0", "/job:worker/task:1/device:GPU:0"),),
        (("/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"),),
    )
    def test_anything_else_is_taken_as_joined_all_to_all(self, devices: tuple[str, ...]):
        self.fake_nvidia_smi()
        found, (line,) = self.detect(*devices)
        self.assertEqual(found, topology.preset("fully_connected", 2))
        self.assertIn("pass topology=", line)

    @parameterized.parameters(([],), "/cpu:0", "")
    def test_at_least_one_device(self, devices: Any):
        with self.assertRaisesRegex(ValueError, "devices must be .* at least one device"):
            detection.detect(devices)

    @parameterized.parameters(0, None, b"/cpu:0")
    def test_devices_must_be_names(self, device: Any):
        with self.assertRaisesRegex(ValueError, "devices must hold .* got "):
            detection.detect(["/cpu:0", device])

    def test_gpus_are_joined_as_nvidia_smi_reports(self):
        self.fake_nvidia_smi()
        found, (line,) = self.detect(*(f"/device:GPU:{index}" for index in range(4)))
        wanted = {(0, 1): 1, (0, 2): 2, (0, 3): 3, (1, 2): 4, (1, 3): 5, (3, 2): 6}
        self.assert_nvlinks(found, wanted)
        self.assertIn("as nvidia-smi reports", line)

    def test_in_the_order_of_the_devices(self):
        self.fake_nvidia_smi()
        found, _ = self.detect("/gpu:3", "/job:localhost/replica:0/task:0/device:GPU:1", "GPU:0")
        self.assert_nvlinks(found, {(0, 1): 5, (0, 2): 3, (2, 1): 1})

    @parameterized.parameters(
        ("3,1,0", {(0, 1): 5, (0, 2): 3}),
        (" 2, 3 ,1", {(0, 1): 6, (0, 2): 4}),
        ("GPU-bbbb,GPU-aaaa-0,3", {(0, 1): 2, (0, 2): 6}),
    )
    def test_numbers_are_those_of_the_visible_gpus(
        self, visible: str, wanted: dict[tuple[int, int], int]
    ):
        self.fake_nvidia_smi()
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        found, _ = self.detect("GPU:0", "GPU:1", "GPU:2")
        self.assert_nvlinks(found, wanted)

    @parameterized.parameters("", "0", "0,-1,1", "MIG-1234,0", "0,9", "0,GPU-aa,1", "0,GPU-dddd")
    def test_a_gpu_that_is_not_visible(self, visible: str):
        self.fake_nvidia_smi()
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        found, (line,) = self.detect("GPU:0", "GPU:1")
        self.assertEqual(found, topology.preset("fully_connected", 2))
        self.assertIn("CUDA_VISIBLE_DEVICES", line)
        self.assertIn("pass topology=", line)

    @parameterized.parameters(
        ("No devices were found\n", "No devices were found"),
        ("GPU-aaaa-0, N/A\n", "GPU-aaaa-0, N/A"),
    )
    def test_uuids_that_cannot_be_read(self, uuids: str, message: str):
        self.fake_nvidia_smi(uuids=uuids)
        os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-aaaa,GPU-bbbb"
        found, (line,) = self.detect("GPU:0", "GPU:1")
        self.assertEqual(found, topology.preset("fully_connected", 2))
        self.assertIn(f"printed '{message}'; pass topology=", line)

    def test_nvidia_smi_is_missing(self):
        found, (line,) = self.detect("GPU:0", "GPU:1")
        self.assertEqual(found, topology.preset("fully_connected", 2))
        self.assertIn("no nvidia-smi on the PATH; pass topology=", line)

    @parameterized.parameters(
        ("print('driver is not loaded'); sys.exit(9)", "status 9: driver is not loaded"),
        ("print('hello'); sys.exit()", "no table of `nvidia-smi topo -m`"),
        ("time.sleep(60)", "did not answer within 0.5 s"),
    )
    def test_nvidia_smi_fails(self, before: str, message: str):
        self.fake_nvidia_smi(before=before)
        with mock.patch.object(detection, "_TIMEOUT_SECONDS", 0.5 if "sleep" in before else 10.0):
            found, (line,) = self.detect("GPU:0", "GPU:1")
        self.assertEqual(found, topology.preset("fully_connected", 2))
        self.assertIn(message, line)

    def test_the_gpus_of_the_driver(self):
        self.assertEqual(detection.gpus_of_nvidia_smi(), ())
        self.fake_nvidia_smi(before="print('Model A\\nModel B'); sys.exit()")
        self.assertEqual(detection.gpus_of_nvidia_smi(), ("Model A", "Model B"))

    def test_runs_nvidia_smi_and_logs_once(self):
        self.fake_nvidia_smi()
        first, _ = self.detect("GPU:0", "GPU:1")
        with self.assertNoLogs("absl", "INFO"):
            self.assertIs(detection.detect(["GPU:0", "GPU:1"]), first)
        self.detect("GPU:2", "GPU:1")
        self.assertEqual((self.folder / "calls").read_text(), "x")

    @contextlib.contextmanager
    def tensorflow_with(self, logical_gpus: dict[int, int]) -> Iterator[None]:
        """Puts a TensorFlow in place that has cut some GPUs into so many logical ones (0: not)."""
        tensorflow = mock.MagicMock()
        physical = [mock.Mock() for _ in logical_gpus]
        for device, number in zip(physical, logical_gpus):
            device.name = f"/physical_device:GPU:{number}"
        tensorflow.config.get_visible_devices.return_value = physical
        tensorflow.config.get_logical_device_configuration.side_effect = [
            [object()] * count or None for count in logical_gpus.values()
        ]
        with mock.patch.dict(sys.modules, {"tensorflow": tensorflow}):
            yield

    def test_logical_gpus_of_one_physical_gpu(self):
        self.fake_nvidia_smi()
        with self.tensorflow_with({1: 2, 3: 0}):
            found, lines = self.detect("GPU:0", "GPU:1", "GPU:2")
        self.assertEqual(found, topology.preset("fully_connected", 3))
        self.assertRegex(lines[-1], "several of these devices are one GPU; pass topology=")

    def test_unknown_devices_are_cpus_where_there_is_nothing_else(self):
        tensorflow = mock.MagicMock()
        device = mock.Mock(device_type="CPU")
        tensorflow.config.get_visible_devices.return_value = [device]
        with mock.patch.dict(sys.modules, {"tensorflow": tensorflow}):
            found, _ = self.detect("", "CPU:1")
        self.assertEqual(found, topology.preset("shared_memory", 2))


class ImportTest(absltest.TestCase):
    def test_neither_topologies_nor_plans_import_tensorflow(self):
        script = (
            "import sys, tfcdo, tfcdo.plan.algorithms, tfcdo.plot\n"
            "tfcdo.topology.detect(['GPU:0', 'CPU:0'])\n"
            "print(tfcdo.__version__, tfcdo.topology.preset('dgx1').num_devices)\n"
            "sys.exit('tensorflow' in sys.modules)"
        )
        result = warm_python.run_cold("-c", script)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertRegex(result.stdout, r"^\d+\.")
        self.assertEndsWith(result.stdout, " 8\n")

    def test_an_unknown_name(self):
        import tfcdo

        with self.assertRaisesRegex(AttributeError, "attribute.*NoSuchReduce"):
            tfcdo.NoSuchReduce  # type: ignore[attr-defined]  # noqa: B018

    def test_every_public_name_is_listed(self):
        import tfcdo

        self.assertContainsSubset(tfcdo.__all__, dir(tfcdo))
        source = pathlib.Path(tfcdo.__file__).read_text(encoding="utf-8")
        homes = re.findall(r"^    from tfcdo\.?(\S*) import (\w+) as \2$", source, re.MULTILINE)
        # As type checkers read it, and as it is.
        self.assertEqual(
            {**tfcdo._MODULES, **dict.fromkeys(tfcdo._PACKAGES, "")},
            {n: m for m, n in homes},
        )
        for name in tfcdo.__all__:
            self.assertIsNotNone(getattr(tfcdo, name))


if __name__ == "__main__":
    absltest.main()
