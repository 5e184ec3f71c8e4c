"""Makes findings of a report: what is right, what is worth knowing, what is wrong, and the remedy.

All here is about the report alone, so that each finding can be tested without the machine that has
it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tfcdo.doctor.examination import COMPARED
from tfcdo.doctor.examination import Report

OK, NOTE, WRONG = "ok", "note", "wrong"
# A link this much slower than the topology says makes its plans bad ones.
_SLOW = 0.5
# Of pairs with the same trouble, so many are named.
_MOST_NAMED = 12
_NONE_NEEDED = "nothing to do"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
      severity: `OK`; `NOTE`, which is worth knowing; or `WRONG`, which makes the exit status 1.
      text: what was found.
      remedy: what to do about it, on one line.
    """

    severity: str
    text: str
    remedy: str = _NONE_NEEDED


def findings_of(report: Report) -> list[Finding]:
    """Lists what a report says.

    Args:
      report: the report.

    Returns:
      The findings, in the order of the examination.
    """
    parts = (_tf_config, _versions, _devices, _all_reduces, _topology, _models, _pairs, _sums)
    return [finding for part in parts for finding in part(report)]


def _tf_config(report: Report) -> Iterator[Finding]:
    config = report.tf_config
    if config.problem:
        remedy = 'set it as in {"cluster": {"worker": ["a:2222", "b:2222"]}, '
        remedy += '"task": {"type": "worker", "index": 0}}, or use `tfcdo launch`'
        yield Finding(WRONG, config.problem, remedy)
    for host in config.hosts:
        text = f"{host.name}: {host.status}"
        if host.reached:
            yield Finding(OK, text)
        elif host.is_here:
            remedy = "end the process that uses the port, or give the task another on all hosts"
            yield Finding(WRONG, text, remedy)
        else:
            yield Finding(WRONG, text, "check the name, the port, the route and the firewalls")


def _versions(report: Report) -> Iterator[Finding]:
    found = report.versions
    if found.get("problem"):
        yield Finding(WRONG, found["problem"], found["remedy"])
    elif "error" in found:
        remedy = "run `python -c 'import tensorflow'` and see what it prints; reinstall TensorFlow"
        yield Finding(WRONG, f"TensorFlow does not start: {found['error']}", remedy)
    else:
        yield Finding(OK, f"TensorFlow {found['tensorflow']} can be used")


def _devices(report: Report) -> Iterator[Finding]:
    devices = report.devices
    if devices is None:
        return
    if "error" in devices:
        remedy = "choose fewer with -g, or see what TensorFlow says of its devices"
        yield Finding(WRONG, f"the devices cannot be used: {devices['error']}", remedy)
        return
    gpus = [name for name in devices["physical"] if "GPU" in name]
    driver_gpus = devices["gpus_of_nvidia_smi"]
    if len(driver_gpus) > len(gpus):
        remedy = "pip install 'tensorflow[and-cuda]', and see whether CUDA_VISIBLE_DEVICES is set"
        seen = f"nvidia-smi shows {len(driver_gpus)} GPUs, and TensorFlow {len(gpus) or 'none'}"
        yield Finding(NOTE, seen, remedy)
    if devices["on_cpu"]:
        text = {0: "no GPU", 1: "one GPU, which has nothing to all-reduce with"}
        yield Finding(
            NOTE,
            f"TensorFlow sees {text.get(len(gpus), f'{len(gpus)} GPUs')}: what follows is about "
            f"{devices['description']}",
            "none needed to try things; to train on several GPUs, run this where they are",
        )
    else:
        yield Finding(OK, f"{devices['description']} are examined")


def _all_reduces(report: Report) -> Iterator[Finding]:
    for found in report.all_reduces:
        if "error" in found:
            yield Finding(WRONG, f"asking for all-reduces: {found['error']}", _REPORT)
        elif not found["can_run"]:
            text = f"tfcdo.{found['name']} cannot run here: {found['reason']}"
            yield Finding(NOTE, text, found["remedy"])


_REPORT = "please report this, with the output of `tfcdo doctor --json`"


def _topology(report: Report) -> Iterator[Finding]:
    topology = report.topology
    if topology is None:
        return
    if "error" in topology:
        yield Finding(WRONG, f"finding out the topology: {topology['error']}", _REPORT)
    elif "pass topology=" in topology["reason"]:
        text = f"the topology is assumed to be {topology['name']!r}: {topology['reason']}"
        remedy = "tfcdo.AutoAllReduce(topology=tfcdo.topology.Topology.from_nvidia_smi(text))"
        yield Finding(NOTE, text, remedy)


def _models(report: Report) -> Iterator[Finding]:
    for model in report.models:
        if "error" in model:
            yield Finding(WRONG, f"planning for {model['model']}: {model['error']}", _REPORT)


def _pairs(report: Report) -> Iterator[Finding]:
    pairs = report.pairs
    if not pairs:
        return
    trouble = {
        "hang": (
            [pair for pair in pairs if pair.get("hangs")],
            "switch IOMMU and ACS off in the BIOS, or leave devices out as in the line below",
        ),
        "fail": (
            [pair for pair in pairs if "error" in pair and not pair["hangs"]],
            "see what the driver logged (`dmesg`), or leave devices out as in the line below",
        ),
        "arrive with wrong bits": (
            [pair for pair in pairs if pair.get("wrong")],
            "switch IOMMU and ACS off in the BIOS, or leave devices out as in the line below",
        ),
    }
    if not any(found for found, _ in trouble.values()):
        yield Finding(OK, f"copies between all {len(pairs)} ordered pairs of devices arrive right")
    for what, (found, remedy) in trouble.items():
        if found:
            reasons = "; ".join(dict.fromkeys(pair["error"] for pair in found if "error" in pair))
            text = f"copies from {_named(found, report)} {what}"
            yield Finding(WRONG, text + (f": {reasons}" if reasons else ""), remedy)
    skipped = [pair for pair in pairs if "skipped" in pair]
    if skipped:
        text = f"{len(skipped)} pairs of devices were not tried: {skipped[0]['skipped']}"
        yield Finding(NOTE, text, "mend those first and run this again")
    slow = [pair for pair in pairs if _is_slow(pair, report)]
    if slow:
        measured = min(pair["bandwidth"] for pair in slow) / 1e9
        yield Finding(
            NOTE,
            f"copies from {_named(slow, report)} are slower than half of what the topology "
            f"{(report.topology or {}).get('name')!r} says (down to {measured:.1f} GB/s)",
            "see `nvidia-smi nvlink -s` and `lspci -vv`; or describe the machine with topology=",
        )


def bandwidth_in_topology(report: Report, source: int, target: int) -> float | None:
    """Returns what the topology says of a link, in bytes per second; None for no limit."""
    for link in (report.topology or {}).get("links", ()):
        if (link["source"], link["target"]) == (source, target):
            bandwidth: float | None = link["bandwidth"]
            return bandwidth
    return None


def _is_slow(pair: dict[str, Any], report: Report) -> bool:
    planned = bandwidth_in_topology(report, pair["source"], pair["target"])
    return bool(planned and "bandwidth" in pair and pair["bandwidth"] < _SLOW * planned)


def _named(pairs: Sequence[dict[str, Any]], report: Report) -> str:
    names = [short_name(name) for name in (report.devices or {})["examined"]]
    named = ", ".join(
        f"{names[pair['source']]} to {names[pair['target']]}" for pair in pairs[:_MOST_NAMED]
    )
    more = len(pairs) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _sums(report: Report) -> Iterator[Finding]:
    for ours, tensorflow in COMPARED:
        if ours in report.sums:
            yield from _own_sum(ours, report.sums[ours])
            yield from _sum_of_tensorflow(tensorflow, report.sums[tensorflow], ours, report)


def _own_sum(name: str, found: dict[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        yield Finding(WRONG, f"{name} fails: {found['error']}", f"use another class; {_REPORT}")
    elif found.get("wrong"):
        text = f"{name} sums wrong: {found['wrong']} of {found['elements']} elements"
        yield Finding(WRONG, text, "see the pairs above; if all of them are right, report this")
    elif not found["skipped"]:
        yield Finding(OK, f"{name} sums right")


def _sum_of_tensorflow(
    name: str, found: dict[str, Any], ours: str, report: Report
) -> Iterator[Finding]:
    """Finds a fault of TensorFlow's class, which is worth knowing but no fault of this machine."""
    if "error" in found:
        yield Finding(NOTE, f"{name} fails: {found['error']}", f"use {ours}")
    elif found.get("wrong"):
        count = len((report.devices or {}).get("examined", ()))
        text = f"{name} sums wrong: {found['wrong']} of {found['elements']} elements"
        yield Finding(NOTE, f"{text} on {count} devices, without an error", f"use {ours}")


def script_line(report: Report) -> str:
    """Returns the line to paste into a training script.

    Args:
      report: the report.

    Returns:
      A line of Python; one for the shell if TensorFlow must be mended first.
    """
    if report.devices is None:
        return str(report.versions.get("remedy") or "pip install --force-reinstall tensorflow")
    if "error" in report.devices:
        return "import tfcdo; strategy = tfcdo.MirroredStrategy()"
    ops = f"cross_device_ops={_best_class(report)}()"
    names, on_cpu = report.devices["examined"], report.devices["on_cpu"]
    usable = _usable_devices(report)
    if report.tf_config.hosts:
        each = f", devices_per_worker={len(names)}" if on_cpu else ""
        return f"import tfcdo; strategy = tfcdo.MultiWorkerMirroredStrategy({ops}{each})"
    if len(usable) == len(names) and not on_cpu:
        return f"import tfcdo; strategy = tfcdo.MirroredStrategy({ops})"
    if len(usable) < len(names):
        short = list(map(short_name, usable))
        return f"import tfcdo; strategy = tfcdo.MirroredStrategy({short}, {ops})"
    devices = f"configure_virtual_cpus({len(names)})"
    return (
        "import tfcdo; from tfcdo.virtual_devices import configure_virtual_cpus; "
        f"strategy = tfcdo.MirroredStrategy({devices}, {ops})"
    )


def _best_class(report: Report) -> str:
    """Returns the first class whose sums were right, NCCL before all others."""
    for name, _ in (COMPARED[-1], *COMPARED[:-1]):
        found = report.sums.get(name, {})
        if "error" not in found and not found.get("skipped") and found.get("wrong") == 0:
            return name
    return COMPARED[0][0]


def _usable_devices(report: Report) -> list[str]:
    """Leaves out devices until no pair that hangs, fails or lies is left, the worst first."""
    names: list[str] = (report.devices or {})["examined"]
    bad = [
        (pair["source"], pair["target"])
        for pair in report.pairs
        if pair.get("wrong") or "error" in pair
    ]
    left = set(range(len(names)))
    while bad:
        ends = list(itertools.chain.from_iterable(bad))
        # Of equally bad ones the last, as the first device is where most scripts put other things.
        worst = max(left, key=lambda device: (ends.count(device), device))
        left.remove(worst)
        bad = [pair for pair in bad if worst not in pair]
    return [names[index] for index in sorted(left)]


def short_name(device: str) -> str:
    """Shortens the full name of a device.

    Example:
      >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1")
      'GPU:1'
    """
    return ":".join(device.split(":")[-2:])
