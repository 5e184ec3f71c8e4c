"""The manifests of docs/kubernetes.md: their names, ports, counts and commands fit together."""

from __future__ import annotations

import pathlib
import re
import shlex
from typing import Any

import yaml
from absl.testing import absltest

from tfcdo.cli import launch

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kubernetes.md"


def manifests() -> dict[str, Any]:
    texts = re.findall(r"```yaml\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    found = [part for text in texts for part in yaml.safe_load_all(text)]
    return {part["kind"]: part for part in found}


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
