"""Detects the links between the devices of this machine."""

from __future__ import annotations

import functools
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence

from tfcdo import checks, log
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import MEASURED, Topology

_TIMEOUT_SECONDS = 10.0


class _UnknownError(Exception):
    """Says why it is not known what joins some devices."""


def detect(devices: Sequence[str]) -> Topology:
    """Returns the topology of some devices of this machine.

    GPUs are joined as `nvidia-smi topo -m` reports, or, if it does not run, all to all. CPU devices
    are `shared_memory`, as are unknown ones if TensorFlow sees nothing but CPUs, and the logical
    devices of one GPU. All others are taken as joined all to all: devices of several types or
    hosts, unknown ones, and several GPUs of which one is cut. The result is logged (level INFO) the
    first time. Measurements are not looked for: pass them as `topology=`.

    Args:
      devices: TensorFlow device names; "" for an unknown device.

    Returns:
      A topology over `len(devices)` devices, in their order.

    Raises:
      ValueError: if there are no devices, or `devices` holds something that is not a string.

    References:
      The legend that `nvidia-smi topo -m` prints below its table.

    Example:
      >>> detect(["/device:CPU:0", "/device:CPU:1"]).name
      'shared_memory'
    """
    return detect_with_reason(checks.check_device_list(devices))[0]


@functools.lru_cache(maxsize=64)
def detect_with_reason(devices: tuple[str, ...]) -> tuple[Topology, str]:
    """Returns the topology of `detect`, and a sentence that says how it was found."""
    topology, reason = _choose(devices)
    names = ", ".join(device or "an unknown device" for device in devices)
    log.info_once(f"topology {topology.name!r} for {names}: {reason}")
    return topology, reason


def name_of_measured(devices: Sequence[str]) -> str | None:
    """Returns a name for a measurement of different devices of one kind and host; else None."""
    hosts, kinds, indices = _parse_all(devices)
    if len(hosts) > 1 or len(set(kinds)) > 1:
        return None
    count = len(devices)
    if kinds[0] == "CPU":
        return f"{MEASURED}{count} CPU devices of {processor_name()} with {num_cores()} cores"
    if kinds[0] != "GPU" or len(set(indices)) < count:
        return None
    models = " and ".join(dict.fromkeys(gpus_of_nvidia_smi())) or "of unknown models"
    return f"{MEASURED}{count} GPUs, {models}, joined as {detect(devices).fingerprint[:8]}"


def gpus_of_nvidia_smi() -> tuple[str, ...]:
    """Returns the models of all GPUs that the driver shows; none if nvidia-smi does not run."""
    try:
        names = _run_nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
    except _UnknownError:
        return ()
    return tuple(name.strip() for name in names)


def processor_name() -> str:
    """Returns the processor's name, or its architecture if Linux does not name it."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def num_cores() -> int | None:
    """Returns the number of cores that this process may use; outside Linux, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _choose(devices: Sequence[str]) -> tuple[Topology, str]:
    """Returns the topology of some devices, and the reason for this one."""
    hosts, kinds, indices = _parse_all(devices)
    if set(kinds) == {"CPU"} and len(hosts) < 2:
        return preset("shared_memory", len(devices)), "CPU devices of one host"
    try:
        if set(kinds) != {"GPU"} or len(hosts) > 1:
            raise _UnknownError("these are not the CPUs of one host, nor its GPUs")
        visible_gpus = _visible_gpus(indices)
        if len(visible_gpus) > len(set(visible_gpus)) == 1:
            return preset("shared_memory", len(devices)), "logical devices of one GPU"
        if len(set(visible_gpus)) < len(visible_gpus):
            raise _UnknownError("several of these devices are one GPU")
        machine, numbers = _read_nvidia_smi()
        missing = sorted(set(visible_gpus) - set(range(len(numbers))))
        if missing:
            raise _UnknownError(f"nvidia-smi and CUDA_VISIBLE_DEVICES show no GPU for {missing}")
        return machine.subset([numbers[gpu] for gpu in visible_gpus]), "as nvidia-smi reports"
    except _UnknownError as error:
        machine = preset("fully_connected", len(devices))
        return machine, f"{error}; pass topology= to say what joins them"


def _parse_all(devices: Sequence[str]) -> tuple[set[str], list[str], list[int]]:
    """Returns the known hosts, and the type ("" if unknown) and the index of each device."""
    hosts, kinds, indices = set(), [], []
    for device in devices:
        host, _, name = device.rpartition("/")
        found = re.fullmatch(r"(?:device:)?(\w+):(\d+)", name, re.IGNORECASE)
        hosts.add(host)
        kinds.append(found[1].upper() if found else "")
        indices.append(int(found[2]) if found else 0)
    # Where TensorFlow is there and sees nothing but CPUs, an unknown device is a CPU.
    tf = sys.modules.get("tensorflow")
    if tf and {device.device_type for device in tf.config.get_visible_devices()} == {"CPU"}:
        kinds = [kind or "CPU" for kind in kinds]
    return hosts - {""}, kinds, indices


def _visible_gpus(logical_gpus: Sequence[int]) -> list[int]:
    """Returns the physical GPU of each logical GPU, numbered as CUDA shows them to this process."""
    tf = sys.modules.get("tensorflow")
    if tf is None:
        return list(logical_gpus)
    # It is there, so it may have cut GPUs into several logical ones or hidden some.
    physical = [
        int(gpu.name.rpartition(":")[2])
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]
    return [physical[gpu] if gpu < len(physical) else gpu for gpu in logical_gpus]


def _read_nvidia_smi() -> tuple[Topology, list[int]]:
    """Returns the machine, and the number in it of each GPU that CUDA shows to this process."""
    # GPUs are taken to be in the same order for CUDA as for nvidia-smi, as GPUs of one model are.
    try:
        machine = Topology.from_nvidia_smi(_run_nvidia_smi("topo", "-m"))
    except ValueError as error:
        raise _UnknownError(f"the table of `nvidia-smi topo -m` cannot be read: {error}") from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return machine, list(range(machine.num_devices))
    numbers: list[int] = []
    for entry in visible.replace(" ", "").split(","):
        found = _numbers_by_uuid(entry) if entry.startswith("GPU-") else [entry]
        # As for CUDA, the first entry that is not a GPU hides all after it.
        if len(found) != 1 or not found[0].isdecimal() or int(found[0]) >= machine.num_devices:
            break
        numbers.append(int(found[0]))
    return machine, numbers


def _numbers_by_uuid(beginning: str) -> list[str]:
    """Asks nvidia-smi for the numbers of the GPUs whose UUIDs begin so."""
    numbers = []
    for row in _run_nvidia_smi("--query-gpu=uuid,index", "--format=csv,noheader").splitlines():
        found = re.fullmatch(r"(\S+),\s*(\d+)", row.strip())
        if not found:
            raise _UnknownError(f"`nvidia-smi --query-gpu=uuid,index` printed {row!r}")
        if found[1].startswith(beginning):
            numbers.append(found[2])
    return numbers


@functools.lru_cache(maxsize=4)
def _run_nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi."""
    command = " ".join(("nvidia-smi", *arguments))
    try:
        return subprocess.check_output(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        problem = "there is no nvidia-smi on the PATH"
    except subprocess.TimeoutExpired:
        problem = f"`{command}` did not answer within {_TIMEOUT_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        output = " ".join(error.stdout.split())[:200]
        problem = f"`{command}` failed with status {error.returncode}: {output}"
    except OSError as error:
        problem = f"`{command}` cannot be run: {error}"
    raise _UnknownError(problem)
