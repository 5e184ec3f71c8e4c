"""`tfcdo launch`: its workers, what they print, and its arguments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import cli_testing
from absl.testing import absltest, parameterized
from launch_testing import SECONDS, LaunchTestCase

from tfcdo.cli import launch
from tfcdo.cluster import worker
from tfcdo.launch import cluster, supervisor


class WorkersTest(LaunchTestCase):
    def test_each_worker_knows_the_cluster_and_its_arguments(self):
        result = self.launch(
            *("--workers", "3", "--devices-per-worker", "2"),
            *("--", "train.py", "--workers", "--", "x"),
            script=f"""
            print(json.dumps([
                json.loads(os.environ["TF_CONFIG"]),
                os.environ["{worker.DEVICES_PER_WORKER}"],
                os.environ["{worker.RESTART_COUNT}"],
                sys.argv[1:],
                sys.stdin.read(),
            ]))
            """,
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        lines = dict(line.split(" | ", 1) for line in result.stdout.splitlines())
        self.assertCountEqual(lines, ["worker 0", "worker 1", "worker 2"])
        clusters = set()
        for index in range(3):
            config, devices, restart, arguments, read = json.loads(lines[f"worker {index}"])
            self.assertEqual(config["task"], {"type": "worker", "index": index})
            self.assertEqual((devices, restart, read), ("2", "0", ""))
            self.assertEqual(arguments, ["--workers", "--", "x"])
            clusters.add(tuple(config["cluster"]["worker"]))
        (addresses,) = clusters
        self.assertLen(set(addresses), 3)
        for address in addresses:
            self.assertRegex(address, r"^127\.0\.0\.1:\d+$")

    def test_a_worker_can_listen_at_its_port_and_nobody_else_is_given_it(self):
        result = self.launch(
            *("--workers", "2", "train.py"),
            script="""
            import socket
            addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", int(addresses[task].rpartition(":")[2])))
                server.listen()
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", int(addresses[task].rpartition(":")[2])))
                except OSError as error:
                    print(error.strerror)
            """,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("Address already in use"), 2)

    def test_one_of_several_hosts(self):
        with cluster.reserved_ports(2) as addresses:
            pass
        result = self.launch(
            *("--hosts", ",".join(addresses), "--index", "1", "train.py"),
            script=f"""
            print(os.environ["TF_CONFIG"], "{worker.DEVICES_PER_WORKER}" in os.environ)
            """,
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, f"worker 1 | {cluster.tf_config(addresses, 1)} False\n")

    @parameterized.parameters(None, "by hand")
    def test_the_token_that_keeps_jobs_apart(self, own):
        self.enter_context(_variable(worker.CLUSTER_TOKEN, own))
        script = f'print(os.environ.get("{worker.CLUSTER_TOKEN}"))'
        with cluster.reserved_ports(1) as [address]:
            pass
        runs = [
            self.launch("--workers", "2", "train.py", script=script),
            self.launch("--workers", "2", "train.py"),
            self.launch("--hosts", address, "--index", "0", "train.py"),
        ]
        tokens = [[line.split(" | ")[1] for line in run.stdout.splitlines()] for run in runs]
        if own is None:
            for first, second in tokens[:2]:
                self.assertEqual(first, second)
                self.assertRegex(first, "^[0-9a-f]{32}$")
            self.assertNotEqual(tokens[0], tokens[1])
        else:
            self.assertEqual([[own] * 2] * 2, tokens[:2])
        # Launchers of several machines cannot agree on one.
        self.assertEqual([[str(own)]], tokens[2:])

    def test_names_of_torchrun(self):
        with cluster.reserved_ports(1) as [address]:
            pass
        script = "print(json.loads(os.environ['TF_CONFIG'])['task']['index'])"
        local = self.launch("--nproc-per-node", "2", "--nnodes=1", "train.py", script=script)
        self.assertCountEqual(local.stdout.splitlines(), ["worker 0 | 0", "worker 1 | 1"])
        arguments = ("--nnodes", "1", "--node_rank", "0", "--nproc_per_node", "1")
        result = self.launch("--hosts", address, *arguments, "train.py")
        self.assertEqual(result.stdout, "worker 0 | 0\n", result.stderr)

    def test_each_worker_has_its_gpus(self):
        self.enter_context(_variable("CUDA_VISIBLE_DEVICES", "4, 5,GPU-a,7,8"))
        result = self.launch(
            *("--workers", "2", "--gpus-per-worker", "2", "train.py"),
            script="print(os.environ['CUDA_VISIBLE_DEVICES'])",
        )
        self.assertCountEqual(
            result.stdout.splitlines(), ["worker 0 | 4,5", "worker 1 | GPU-a,7"], result.stderr
        )
        result = self.launch("--workers", "3", "--gpus-per-worker", "2", "train.py")
        self.assertEqual(result.returncode, 2)
        self.assertIn("3 workers on this machine with 2 GPUs each need 6 GPUs; CUDA", result.stderr)

    @parameterized.parameters(
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0,1,2,3", 3, ["0", "1", "2"]),
        ("0,1", 1, ["0,1"]),
        ("", 2, ["", ""]),
        ("-1", 2, ["-1", "-1"]),
    )
    def test_no_two_workers_get_one_gpu(self, visible, workers, expected):
        self.enter_context(_variable("CUDA_VISIBLE_DEVICES", visible))
        result = self.launch(
            *("--workers", str(workers), "train.py"),
            script="print(os.environ['CUDA_VISIBLE_DEVICES'])",
        )
        lines = sorted(result.stdout.splitlines())
        self.assertEqual([line.partition(" | ")[2] for line in lines], expected, result.stderr)
        self.assertEqual("3 workers use 3 of 4 GPUs" in result.stderr, workers == 3)

    def test_too_few_gpus(self):
        self.enter_context(_variable("CUDA_VISIBLE_DEVICES", "0"))
        self.assert_refused("with 1 GPU each need 2 GPUs", "--workers", "2", "train.py")

    def test_a_machines_share_of_a_cluster(self):
        with cluster.reserved_ports(1) as [address]:
            pass
        first = int(address.rpartition(":")[2])
        result = self.launch(
            *("--hosts", f"a:7000,{address}", "--index", "1", "--workers", "2", "train.py"),
            script="print(os.environ['TF_CONFIG'])",
        )
        addresses = ("a:7000", "a:7001", address, f"127.0.0.1:{first + 1}")
        self.assertCountEqual(
            result.stdout.splitlines(),
            [f"worker {n} | {cluster.tf_config(addresses, n)}" for n in (2, 3)],
            result.stderr,
        )

    def test_addresses(self):
        self.assertEqual(("a:2222", "[::1]:2222"), launch.parse_hosts("a:2222, [::1]:2222"))

    def test_a_module(self):
        result = self.launch(
            "--workers", "1", "-m", "train", "a", script="print(__name__, sys.argv[1:])"
        )
        self.assertEqual(result.stdout, "worker 0 | __main__ ['a']\n")


class OutputTest(LaunchTestCase):
    def test_lines_stay_whole_and_in_order_on_their_own_stream(self):
        result = self.launch(
            *("--workers", "3", "train.py"),
            script="""
            for number in range(300):
                os.write(1, b"out ")
                os.write(1, b"%d\\n" % number)
                os.write(2, b"error %d\\n" % number)
            os.write(1, b"no end")
            """,
        )
        self.assertEqual(result.returncode, 0)
        for number in range(3):
            prefix = f"worker {number} | "
            for text, word in ((result.stdout, "out"), (result.stderr, "error")):
                own = [line for line in text.splitlines() if line.startswith(prefix)]
                expected = [f"{prefix}{word} {number}" for number in range(300)]
                self.assertEqual(own, expected + [f"{prefix}no end"] * (word == "out"))

    @parameterized.parameters((None, ["E"]), ("0", ["WARNING", "I", "E"]))
    def test_tensorflow_shows_errors_only_unless_the_user_wants_more(self, level, expected):
        self.enter_context(_variable("TF_CPP_MIN_LOG_LEVEL", level))
        result = self.launch(
            *("--workers", "1", "train.py"),
            script="""
            print("WARNING: All log messages before absl::InitializeLog() ...", file=sys.stderr)
            for level in "IE":
                print(level + "0000 00:00:17.5   29 x.cc:3] text", file=sys.stderr)
            print(os.environ["TF_CPP_MIN_LOG_LEVEL"])
            """,
        )
        self.assertEqual(result.stdout, f"worker 0 | {level or 2}\n")
        lines = [line.split(" | ")[1] for line in result.stderr.splitlines()]
        self.assertEqual([re.split("[0:]", line)[0] for line in lines], expected)

    def test_letters_of_any_encoding_reach_a_terminal_that_is_told_to_be_ascii(self):
        self.enter_context(_variable("PYTHONIOENCODING", "ascii"))
        result = self.launch(
            "--workers", "1", "train.py", script="os.write(1, 'Grüße\\n'.encode())"
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, "worker 0 | Grüße\n")

    def test_prefixes_have_colours_where_a_terminal_has(self):
        self.enter_context(_variable("FORCE_COLOR", "1"))
        self.enter_context(_variable("TERM", "xterm"))
        result = self.launch("--workers", "2", "train.py", script="print('text')")
        lines = sorted(result.stdout.splitlines())
        self.assertLen(lines, 2)
        for line in lines:
            self.assertRegex(line, r"^\x1b\[\d+mworker \d \| \x1b\[0mtext$")
        self.assertNotEqual(lines[0][:5], lines[1][:5])

    def test_output_that_nobody_takes_ends_the_job(self):
        process = self.start(
            *("--workers", "2", "train.py"),
            script="""
            mark(f"worker{task}")
            while True: print("line"); time.sleep(0.01)
            """,
        )
        assert process.stdout
        process.stdout.readline()
        self.read_pid("worker0")
        self.read_pid("worker1")
        process.stdout.close()
        assert process.stderr
        error = process.stderr.read()
        self.assertEqual(process.wait(SECONDS), 1)
        # As of other commands: `tfcdo launch ... | head -1` says nothing about it.
        self.assertEqual(error, "")
        self.assert_ended("worker0", "worker1")

    @parameterized.parameters(
        ([b"a\nb", b"c\n"], [b"a", b"bc"]),
        ([b"a\r\nb\r", b"\nc"], [b"a", b"b", b"c"]),
        ([b"10%\r20%\r", b"30%\n"], [b"10%", b"20%", b"30%"]),
        ([b"\n\n"], [b"", b""]),
        ([b"end\r"], [b"end"]),
        ([b"x" * 65_536, b"y", b"z\n"], [b"x" * 65_536 + b"y", b"z"]),
    )
    def test_splitter(self, chunks: list[bytes], expected: list[bytes]):
        self.assertEqual(list(supervisor.split_lines(chunks)), expected)


class ArgumentsTest(LaunchTestCase):
    @parameterized.parameters(
        (["train.py"], "either --workers N"),
        (["--workers", "1:4", "train.py"], "got '1:4': for workers that come and go use Ray Train"),
        (["--workers", "257", "train.py"], "expected a number from 1 to 256; got '257'"),
        (["--workers", "2", "--slurm", "train.py"], "either --slurm, or --workers"),
        (["--slurm", "train.py"], "--slurm: srun must set SLURM_JOB_ID to a number; got ''"),
        (["--workers", "2", "--nnodes", "2", "train.py"], "number of --hosts, 1; got 2"),
        (["--workers", "0", "train.py"], "--workers"),
        (["--workers", "2"], "SCRIPT"),
        (["--workers", "2", "missing.py"], "'missing.py': there is no such script"),
        (["--workers", "2", "--index", "0", "train.py"], "--index needs --hosts"),
        (["--workers", "2", "--devices-per-worker", "0", "train.py"], "--devices-per-worker"),
        (["--hosts", "a:1,b:1", "train.py"], "--hosts needs --index: which of the 2"),
        (["--hosts", "a:1,b:1", "--index", "2", "train.py"], "less than the number of hosts, 2"),
        (["--hosts", "a,b:1", "--index", "0", "train.py"], "must be 'host:port'"),
        (["--hosts", "a:70000", "--index", "0", "train.py"], "a:70000"),
        (["--hosts", "a:1,a:1", "--index", "0", "train.py"], "'a:1' twice"),
        (["--hosts", "", "--index", "0", "train.py"], "must be 'host:port'"),
    )  # fmt: skip
    def test_a_wrong_argument_gets_one_line(self, arguments: list[str], named: str):
        self.assert_refused(named, *arguments)

    def test_the_help_begins_with_examples(self):
        text = cli_testing.run_tfcdo("launch", "--help").output
        self.assertLess(text.index("Examples:"), text.index("--nproc-per-node"))
        self.assertNotRegex(text, r"RANGE|x[<>]=")
        for group in ("Workers:", "Devices:", "Failures:", "Other:"):
            self.assertIn(f"\n{group}\n", text)
        self.assertIn("-h, --help", text)
        for parameter in launch.launch.params:
            for name in parameter.opts if parameter.param_type_name == "option" else ():
                self.assertIn(name, text)

    def test_tensorflow_is_not_imported(self):
        code = (
            "import sys; from tfcdo.cli import launch; "
            "sys.exit(any(name in sys.modules for name in ('tensorflow', 'numpy', 'keras')))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


class EnvironmentTest(parameterized.TestCase):
    @parameterized.parameters((None, None), ("", None), ("3", 3), (" 12 ", 12))
    def test_devices_per_worker(self, text: str | None, expected: int | None):
        with _variable(worker.DEVICES_PER_WORKER, text):
            self.assertEqual(worker.devices_per_worker(), expected)

    @parameterized.parameters("0", "-1", "two", "1.5", "²")
    def test_bad_devices_per_worker(self, text: str):
        with (
            _variable(worker.DEVICES_PER_WORKER, text),
            self.assertRaisesRegex(ValueError, f"_PER_WORKER must be a positive .*{text}"),
        ):
            worker.devices_per_worker()


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


if __name__ == "__main__":
    absltest.main()
