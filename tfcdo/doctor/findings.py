"""Makes findings of a report: checks that passed, notes, problems, and remedies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tfcdo.doctor.examination import (
    COMPARED,
    STRATEGIES,
    Check,
    Failure,
    Pair,
    Report,
    Versions,
)

OK, NOTE, WRONG = "ok", "note", "wrong"
# Number of pairs named in one finding.
_MOST_NAMED = 12
_REPORT = "please report this, with the output of `tfcdo doctor`"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: `WRONG` makes the exit status 1, `NOTE` is worth knowing."""

    severity: str
    text: str
    remedy: str = ""


def findings_of(report: Report) -> list[Finding]:
    """Lists the findings of a report."""
    parts = (_tf_config, _versions, _machine, _pairs, _checks)
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
    if isinstance(found, Failure):
        remedy = "run `python -c 'import tensorflow'` and see what it prints; reinstall TensorFlow"
        yield Finding(WRONG, f"TensorFlow does not start: {found.error}", remedy)
    elif found.problem:
        yield Finding(WRONG, found.problem, found.remedy)
    else:
        yield Finding(OK, f"TensorFlow {found.tensorflow} can be used")
        if found.without_kernels:
            text = (
                f"TensorFlow {found.tensorflow} has no compiled kernels for "
                f"{', '.join(found.without_kernels)}: compiling them at the first run takes up to "
                "30 minutes, or fails (tensorflow/tensorflow#97387)"
            )
            yield Finding(NOTE, text, "install a TensorFlow that was built for these GPUs")


def _machine(report: Report) -> Iterator[Finding]:
    machine = report.machine
    if machine is None:
        return
    if isinstance(machine, Failure):
        remedy = "choose fewer with -g, or see what TensorFlow says of its devices"
        yield Finding(WRONG, f"the devices cannot be used: {machine.error}", remedy)
        return
    num_gpus = sum("GPU" in name for name in machine.physical)
    num_driver_gpus = len(machine.gpus_of_nvidia_smi)
    if num_driver_gpus > num_gpus:
        remedy = "pip install 'tensorflow[and-cuda]', and see whether CUDA_VISIBLE_DEVICES is set"
        seen = f"nvidia-smi shows {num_driver_gpus} GPUs, and TensorFlow {num_gpus or 'none'}"
        yield Finding(NOTE, seen, remedy)
    if machine.on_cpu:
        few = {0: "no GPU", 1: "one GPU, which has nothing to all-reduce with"}
        yield Finding(
            NOTE,
            f"TensorFlow sees {few.get(num_gpus, f'{num_gpus} GPUs')}: what follows is about "
            f"{machine.description}",
            "none needed to try things; to train on several GPUs, run this where they are",
        )
    else:
        yield Finding(OK, f"{machine.description} are examined")
    if machine.nccl_problem:
        text = f"tfcdo.NcclAllReduce cannot run here: {machine.nccl_problem}"
        yield Finding(NOTE, text, machine.nccl_remedy)
    if "pass topology=" in machine.topology_reason:
        assert report.topology
        text = f"the topology is assumed to be {report.topology.name!r}: {machine.topology_reason}"
        remedy = "tfcdo.AutoAllReduce(topology=tfcdo.topology.Topology.from_nvidia_smi(text))"
        yield Finding(NOTE, text, remedy)


# Symptoms of failed copies, and remedies.
_HANG, _FAIL, _LIE = "hang", "fail", "arrive corrupted"
_TROUBLES = {
    _HANG: "switch IOMMU and ACS off in the BIOS, or leave devices out as in the line below",
    _FAIL: "see what the driver logged (`dmesg`), or leave devices out as in the line below",
    _LIE: "switch IOMMU and ACS off in the BIOS, or leave devices out as in the line below",
}


def _trouble(copy: Check | Failure) -> str:
    """Returns one of `_TROUBLES`; "" for a correct copy."""
    if isinstance(copy, Failure):
        return _HANG if copy.hangs else _FAIL
    return _LIE if copy.problem else ""


def _pairs(report: Report) -> Iterator[Finding]:
    pairs = report.pairs
    troubled = {
        trouble: [pair for pair, copies in pairs.items() if _trouble(copies) == trouble]
        for trouble in _TROUBLES
    }
    if pairs and not any(troubled.values()):
        yield Finding(OK, f"copies between all {len(pairs)} ordered pairs of devices are correct")
    for trouble, found in troubled.items():
        if found:
            answers = map(pairs.__getitem__, found)
            errors = dict.fromkeys(one.error for one in answers if isinstance(one, Failure))
            text = f"copies from {_named(found, report)} {trouble}"
            yield Finding(
                WRONG, text + (f": {'; '.join(errors)}" if errors else ""), _TROUBLES[trouble]
            )
    num_devices = len(report.examined)
    missed = num_devices * (num_devices - 1) - len(pairs)
    if missed:
        text = f"{missed} pairs of devices were not tried, because others hang"
        yield Finding(NOTE, text, "fix those first and run this again")


def _named(pairs: Sequence[Pair], report: Report) -> str:
    names = [short_name(name) for name in report.examined]
    named = ", ".join(
        f"{names[source]} to {names[target]}" for source, target in pairs[:_MOST_NAMED]
    )
    more = len(pairs) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _checks(report: Report) -> Iterator[Finding]:
    checks = [
        (f"{name} sums", found, name == pair[0], f"use {pair[0]}")
        for pair in COMPARED
        for name in pair
        if (found := report.sums.get(name))
    ] + [
        (f"metrics of fit under {name}", found, name == STRATEGIES[0], f"use {STRATEGIES[0]}")
        for name, found in report.fits.items()
    ]
    for subject, found, is_ours, instead in checks:
        # A fault of TensorFlow's class is worth knowing but no fault of this machine.
        severity = WRONG if is_ours else NOTE
        remedy = f"see the copies above; if all of them are correct, {_REPORT}"
        remedy = remedy if is_ours else instead
        if isinstance(found, Failure):
            yield Finding(severity, f"{subject} fail: {found.error}", remedy)
        elif found.problem:
            yield Finding(severity, f"{subject} are incorrect: {found.problem}", remedy)
        elif found.ran:
            yield Finding(OK, f"{subject} are correct")


def script_line(report: Report) -> str:
    """Returns the line to paste into a training script."""
    if report.machine is None:
        remedy = report.versions.remedy if isinstance(report.versions, Versions) else ""
        return remedy or "pip install --force-reinstall tensorflow"
    if isinstance(report.machine, Failure):
        return "import tfcdo; strategy = tfcdo.MirroredStrategy()"
    ops = f"cross_device_ops={_best_class(report)}()"
    names, on_cpu = report.examined, report.machine.on_cpu
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
    return f"import tfcdo; strategy = tfcdo.MirroredStrategy(tfcdo.{devices}, {ops})"


def _best_class(report: Report) -> str:
    """Returns the first class with correct sums, NCCL before all others."""
    for name, _ in (COMPARED[-1], *COMPARED[:-1]):
        found = report.sums.get(name)
        if isinstance(found, Check) and found.ran and not found.problem:
            return name
    return COMPARED[0][0]


def _usable_devices(report: Report) -> list[str]:
    """Leaves out devices until no pair that hangs, fails or lies is left, the worst first."""
    names = report.examined
    bad = [pair for pair, copies in report.pairs.items() if _trouble(copies)]
    left = set(range(len(names)))
    while bad:
        ends = list(itertools.chain.from_iterable(bad))
        # If several are equally bad, the last one: most scripts put other data on the first device.
        worst = max(left, key=lambda device: (ends.count(device), device))
        left.remove(worst)
        bad = [pair for pair in bad if worst not in pair]
    return [names[index] for index in sorted(left)]


def short_name(device: str) -> str:
    """Shortens the full name of a device."""
    return ":".join(device.split(":")[-2:])
