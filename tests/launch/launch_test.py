"""`tfcdo launch`: its workers, what they print, its arguments, Slurm and Kubernetes."""

import json
import os
import pathlib
import re
import shlex
import sys
from typing import Any
from unittest import mock

import cli_testing
import yaml
from absl.testing import absltest, parameterized
from launch_testing import SECONDS, LaunchTestCase, changed_variables

from tfcdo.cli import launch
from tfcdo.cluster import worker
from tfcdo.cluster.config import tf_config
from tfcdo.launch import places, supervisor

# What TensorFlow prints before it has read its log level.
_EARLY = """WARNING: All log messages before absl::InitializeLog() ...
I0000 00:00:17.5   29 x.cc:3] text
E0000 00:00:17.5   29 x.cc:3] text"""


class WorkersTest(LaunchTestCase):
    def test_each_worker_knows_the_cluster_and_its_arguments_and_can_listen_at_its_port(self):
        names = [worker.DEVICES_PER_WORKER, worker.RESTART_COUNT]
        result = self.launch(
            *("--workers", "3", "--devices-per-worker", "2"),
            *("--", "train.py", "--workers", "--", "x"),
            script=f"""
            import socket
            config = json.loads(os.environ["TF_CONFIG"])
            port = int(config["cluster"]["worker"][task].rpartition(":")[2])
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", port))
                server.listen()
            try:
                socket.socket().bind(("127.0.0.2", port))  # Nobody is given it, at any address.
            except OSError as error:
                taken = error.strerror
            variables = [os.environ[name] for name in {names}]
            print(json.dumps([config, variables, sys.argv[1:], sys.stdin.read(), taken]))
            print({_EARLY!r}, file=sys.stderr)
            """,
            TF_CPP_MIN_LOG_LEVEL="0",
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        early = [f"worker {n} | {line}" for n in range(3) for line in _EARLY.splitlines()]
        self.assertCountEqual(result.stderr.splitlines(), early)
        lines = dict(line.split(" | ", 1) for line in result.stdout.splitlines())
        self.assertCountEqual(lines, ["worker 0", "worker 1", "worker 2"])
        rows = [json.loads(lines[f"worker {index}"]) for index in range(3)]
        addresses = rows[0][0]["cluster"]["worker"]
        self.assertLen({*addresses}, 3)
        for index, (config, *others) in enumerate(rows):
            self.assertEqual(config, json.loads(tf_config(addresses, index)))
            self.assertRegex(addresses[index], r"^127\.0\.0\.1:\d+$")
            expected = [["2", "0"], ["--workers", "--", "x"], "", "Address already in use"]
            self.assertEqual(expected, others)

    @parameterized.parameters(
        ("--hosts a:7000 --nnodes 1 --node_rank 0 --nproc_per_node 1", ("a:7000",), [0]),
        ("--hosts 'a:7000, b:8000' --index 1", ("a:7000", "b:8000"), [1]),
        (
            "--hosts a:7000,[::1]:8000 --node-rank=1 --nproc-per-node=2",
            ("a:7000", "a:7001", "[::1]:8000", "[::1]:8001"),
            [2, 3],
        ),
    )
    def test_a_machines_share_of_a_cluster(self, arguments, addresses, numbers):
        found, _ = self.variables(*shlex.split(arguments), **{worker.CLUSTER_TOKEN: None})
        configs = {f"worker {n}": {"TF_CONFIG": tf_config(addresses, n)} for n in numbers}
        self.assertEqual(configs, found)

    def test_the_token_that_keeps_jobs_apart(self):
        name, tokens = worker.CLUSTER_TOKEN, []
        for own in ("by hand", None, None):
            found, _ = self.variables("--workers", "2", **{name: own})
            [token] = {variables[name] for variables in found.values()}
            tokens.append(token)
        self.assertRegex(" ".join(tokens), "^by hand [0-9a-f]{32} [0-9a-f]{32}$")
        self.assertNotEqual(*tokens[1:])

    @parameterized.parameters(
        ("0,1,2,3", 2, None, ["0,1", "2,3"]),
        ("0,1,2,3", 3, None, ["0", "1", "2"]),
        ("4, 5,GPU-a,7,8", 2, 2, ["4,5", "GPU-a,7"]),
        ("0,1", 1, None, [None]),
        *((none, 2, None, [None] * 2) for none in ("", "-1", "NoDevFiles")),
        ("0,MIG-b,-1,2,3", 2, None, ["0", "MIG-b"]),
    )
    def test_no_two_workers_get_one_gpu(self, visible, workers, each, expected):
        given = () if each is None else ("--gpus-per-worker", str(each))
        name, own = "CUDA_VISIBLE_DEVICES", {"SLURM_GPUS_PER_TASK": "4"}  # They share a task's.
        found, said = self.variables("--workers", str(workers), *given, **own, **{name: visible})
        self.assertEqual(expected, [variables.get(name) for variables in found.values()])
        self.assertEqual("3 workers use 3 of 4 GPUs" in said, workers == 3)

    def test_a_module(self):
        with mock.patch.object(supervisor, "run", return_value=5) as run:
            self.assertEqual(5, self.run_here("--workers", "1", "-m", "train", "a").status)
        self.assertEqual((sys.executable, "-m", "train", "a"), run.call_args.args[0].command)


class OutputTest(LaunchTestCase):
    def test_lines_stay_whole_and_in_order_on_their_own_stream(self):
        result = self.launch(
            *("--workers", "3", "train.py"),
            script="""
            print(_EARLY, file=sys.stderr)
            time.sleep(0.1 * task)  # One that ends well ends nobody.
            for number in range(300):
                os.write(1, b"out ")
                os.write(1, b"%d\\n" % number)
                os.write(2, b"error %d\\n" % number)
            os.write(1, (os.environ["TF_CPP_MIN_LOG_LEVEL"] + " Grüße, no end").encode())
            """.replace("_EARLY", repr(_EARLY)),
            TF_CPP_MIN_LOG_LEVEL=None,
            PYTHONIOENCODING="ascii",
        )
        self.assertEqual(result.returncode, 0)
        errors = [_EARLY.splitlines()[2], *(f"error {number}" for number in range(300))]
        out = [*(f"out {number}" for number in range(300)), "2 Grüße, no end"]
        for number in range(3):
            prefix = f"worker {number} | "
            for text, expected in ((result.stdout, out), (result.stderr, errors)):
                own = [line for line in text.splitlines() if line.startswith(prefix)]
                self.assertEqual(own, [prefix + line for line in expected])

    @parameterized.parameters(False, True)
    def test_output_that_nobody_takes_ends_the_job(self, is_asked):
        process = self.start(
            *("--workers", "2", "train.py"),
            script="""
            asked = []
            signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic() + 1.0))
            mark(f"worker{task}")
            while not asked or time.monotonic() < asked[0]: print("line"); time.sleep(0.01)
            mark(f"asked{task}")
            """,
        )
        assert process.stdout and process.stderr
        self.read_pid("worker0")
        self.read_pid("worker1")
        if is_asked:  # By who also ends `tee`: workers may still make a backup.
            process.terminate()
            self.assertIn("got SIGTERM", process.stderr.readline())
        process.stdout.close()
        # As of other commands: `tfcdo launch ... | head -1` says nothing about it.
        self.assertEqual(process.stderr.read(), "")
        self.assertEqual(process.wait(SECONDS), 143 if is_asked else 1)
        self.assert_ended("worker0", "worker1")
        self.assertEqual(is_asked, (self.folder / "asked0").exists())

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
        ("--workers 1:4 train.py", "got '1:4': for workers that come and go use Ray Train"),
        ("--workers 257 train.py", "expected a number from 1 to 256; got '257'"),
        ("--workers 2 --slurm train.py", "give --slurm without --workers"),
        ("--slurm train.py", "--slurm: srun must set SLURM_JOB_ID to a number; got ''"),
        ("--workers 2 --nnodes 2 train.py", "--nnodes 2 needs --hosts: the addresses of all"),
        ("--hosts a:1 --index 0 --nnodes 2 train.py", "number of --hosts, 1; got 2"),
        ("--workers 2", "SCRIPT"),
        ("--workers 1 missing.py", "'missing.py': there is no such script"),
        ("--workers 1 ''", "'': there is no such script"),
        ("train.py --workers 1", "give before SCRIPT either --workers N"),
        ("--workers 2 --index 0 train.py", "--index needs --hosts"),
        ("--workers 2 train.py", "with 1 GPU each need 2 GPUs"),
        (
            "--workers 3 --gpus-per-worker 2 train.py",
            "3 workers on this machine with 2 GPUs each need 6 GPUs; CUDA",
        ),
        ("--hosts a:1,b:1 train.py", "--hosts needs --index: which of the 2"),
        ("--hosts a:1,b:1 --index 2 train.py", "less than the number of hosts, 2"),
        ("--hosts '' --index 0 train.py", "must be 'host:port'"),
        ("--hosts a:1,a:1 --index 0 train.py", "'a:1' twice"),
        ("--hosts a:1,a:2 --index 0 --workers 2 train.py", "'a:2' twice"),
        ("--hosts a:65535 --index 0 --workers 2 train.py", "'a:65536'"),
    )
    def test_a_wrong_argument_gets_one_line(self, arguments: str, named: str):
        with changed_variables(CUDA_VISIBLE_DEVICES="0"):
            finished = self.run_here(*shlex.split(arguments))
        cli_testing.check_refused(finished, re.escape(named))

    def test_the_help_begins_with_examples(self):
        text = cli_testing.run_tfcdo("launch", "--help").output
        self.assertLess(text.index("Examples:"), text.index("--nproc-per-node"))
        self.assertNotRegex(text, r"RANGE|x[<>]=")
        options = [one for one in launch.launch.params if one.param_type_name == "option"]
        names = [name for option in options for name in option.opts]
        for shown in ("\nWorkers:\n", "\nDevices:\n", "\nFailures:\n", "\nOther:\n", *names):
            self.assertIn(shown, text)
        self.assertIn("-h, --help", text)


class EnvironmentTest(parameterized.TestCase):
    @parameterized.parameters((None, None), ("", None), ("3", 3), (" 12 ", 12))
    def test_devices_per_worker(self, text: str | None, expected: int | None):
        with changed_variables(**{worker.DEVICES_PER_WORKER: text}):
            self.assertEqual(worker.devices_per_worker(), expected)
            for bad in "0", "-1", "two", "1.5", "²":
                os.environ[worker.DEVICES_PER_WORKER] = bad
                message = f"_PER_WORKER must be a positive .*{bad}"
                self.assertRaisesRegex(ValueError, message, worker.devices_per_worker)


_SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


class SlurmTest(LaunchTestCase):
    def slurm_variables(self, rank: int, **changed: str) -> dict[str, str]:
        (self.folder / "scontrol").write_text(_SCONTROL)
        (self.folder / "scontrol").chmod(0o755)
        return {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "1262", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4", "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2), **changed,
        }  # fmt: skip

    def test_each_task_is_a_worker_with_its_gpus(self):
        addresses = ("node1:10208", "node1:10209", "node2:10208", "node2:10209")
        per_task, by_cpus = {"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_TRES_PER_TASK": "cpu=8"}
        unbound = {"SLURM_GPU_BIND": "none"}, {"SLURM_TRES_BIND": "gres/gpu:verbose,none"}
        for rank, own in enumerate((by_cpus, *({**per_task, **one} for one in unbound), {})):
            variables = self.slurm_variables(rank, CUDA_VISIBLE_DEVICES="4,5", **own)
            found, _ = self.variables("--slurm", **variables)
            gpu = {"CUDA_VISIBLE_DEVICES": str(4 + rank % 2)}
            expected = {f"worker {rank}": {"TF_CONFIG": tf_config(addresses, rank), **gpu}}
            self.assertEqual(expected, found)
        for name in ("GPUS_PER_TASK", "NTASKS_PER_GPU", "GPU_BIND", "TRES_PER_TASK"):
            own = {**variables, f"SLURM_{name}": "gres/gpu:1"}
            for given, own_gpu in (((), None), (("--gpus-per-worker", "1"), "4")):
                found, _ = self.variables("--slurm", *given, **own)
                self.assertEqual(found["worker 3"].get("CUDA_VISIBLE_DEVICES"), own_gpu)

    def test_unequal_nodes(self):
        changed = {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        with mock.patch.dict(os.environ, self.slurm_variables(3, **changed)):
            place = places.in_slurm(os.environ)
            next_job = {**os.environ, "SLURM_JOB_ID": "1263", "SLURM_STEP_ID": "0"}
            self.assertNoCommonElements(place.addresses, places.in_slurm(next_job).addresses)
        self.assertEqual(place.addresses[2:], ("node1:10210", "node2:10208"))
        self.assertEqual((place.own, place.first_here, place.here), (range(3, 4), 0, 1))

    @parameterized.parameters(
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID to a number; got 'x'"),
        ({"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "use srun --distribution=block"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "of node 1 of \\['node1', 'node2'\\]"),
        ({"SLURM_STEP_NODELIST": "other"}, "show hostnames other` has named no host"),
        ({"PATH": ""}, "no `scontrol`: use --hosts with --index \\$SLURM_NODEID"),
    )
    def test_another_place_is_refused(self, changed: dict[str, str], message: str):
        with mock.patch.dict(os.environ, self.slurm_variables(2, **changed)):
            self.assertRaisesRegex(ValueError, message, places.in_slurm, os.environ)


def manifests() -> dict[str, Any]:
    page = pathlib.Path(__file__).parents[2] / "docs" / "kubernetes.md"
    texts = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    return {part["kind"]: part for text in texts for part in yaml.safe_load_all(text)}


class KubernetesTest(absltest.TestCase):
    def check_command(self, container: Any, hosts: list[str], grace: int) -> None:
        self.assertEqual(container["command"], ["sh", "-c"])
        (line,) = container["args"]
        words = shlex.split(line)
        self.assertEqual(words[:3], ["exec", "tfcdo", "launch"])
        with launch.launch.make_context("launch", words[3:], resilient_parsing=True) as context:
            given = context.params
        self.assertEqual(given["hosts"], tuple(f"{host}:2222" for host in hosts))
        self.assertIn("--index $JOB_COMPLETION_INDEX", " ".join(words))
        self.assertLess(given["grace"], grace)
        self.assertEqual(given["script"], "train.py")

    def check_job(self, job: Any, hosts: list[str]) -> None:
        self.assertEqual(job["completionMode"], "Indexed")
        self.assertEqual({job["completions"], job["parallelism"]}, {len(hosts)})
        pod = job["template"]["spec"]
        self.assertEqual(pod["restartPolicy"], "Never")
        (container,) = pod["containers"]
        self.check_command(container, hosts, pod["terminationGracePeriodSeconds"])
        self.assertEqual(container["ports"], [{"containerPort": 2222}])
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        self.assertEqual(mounted, {volume["name"] for volume in pod["volumes"]})

    def test_an_indexed_job_and_its_service(self):
        service, job = (manifests()[kind] for kind in ("Service", "Job"))
        name = job["metadata"]["name"]
        self.assertEqual(service["spec"]["clusterIP"], "None")
        self.assertEqual(service["spec"]["selector"], {"job-name": name})
        subdomain = job["spec"]["template"]["spec"]["subdomain"]
        self.assertEqual(subdomain, service["metadata"]["name"])
        self.check_job(job["spec"], [f"{name}-{index}.{subdomain}" for index in range(2)])
        self.assertEqual("Ignore", job["spec"]["podFailurePolicy"]["rules"][0]["action"])

    def test_a_jobset(self):
        jobset = manifests()["JobSet"]
        (job,) = jobset["spec"]["replicatedJobs"]
        network = jobset["spec"]["network"]
        self.assertTrue(network["enableDNSHostnames"])
        name = f"{jobset['metadata']['name']}-{job['name']}-0"
        hosts = [f"{name}-{index}.{network['subdomain']}" for index in range(2)]
        self.check_job(job["template"]["spec"], hosts)

    def test_a_trainjob(self):
        job = manifests()["TrainJob"]
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        hosts = [f"{name}-node-0-{index}.{name}" for index in range(trainer["numNodes"])]
        self.check_command(trainer, hosts, 60)


if __name__ == "__main__":
    absltest.main()
