"""Finds out what joins the devices of this machine."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfcdo import checks, log
from tfcdo.topology.links import Resource, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.processor import num_cores, processor_name
from tfcdo.topology.routes import GPU_MEMORY, Route
from tfcdo.topology.topology import MEASURED, Topology

_TIMEOUT_SECONDS = 10.0


class _NvidiaSmiError(Exception):
    """Says why nvidia-smi did not report what joins the GPUs."""


def detect(devices: Sequence[str]) -> Topology:
    """Returns the topology of some devices of this machine.

    GPUs are joined as `nvidia-smi topo -m` reports, or, if it does not run, all to all; logical
    GPUs of one physical GPU share its memory. CPU devices are `shared_memory`, as are unknown ones
    if TensorFlow sees nothing but CPUs. Devices of several types or hosts, and other unknown ones,
    are taken as joined all to all. The result, and how it was found, is logged (level INFO) the
    first time that these devices are asked for; later calls return the same. Measurements are not
    looked for: pass them as `topology=`.

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
    return detect_with_reason(devices)[0]


def detect_with_reason(devices: Sequence[str]) -> tuple[Topology, str]:
    """Returns what `detect` returns, and how it was found.

    Args:
      devices: as for `detect`.

    Returns:
      The topology, and one sentence.

    Raises:
      ValueError: as `detect`.

    Example:
      >>> detect_with_reason(["/device:CPU:0", "/device:CPU:1"])[1]
      'CPU devices of one host'
    """
    names = checks.check_device_list(devices)
    for device in names:
        if not isinstance(device, str):
            raise ValueError(
                "devices must hold device names such as 'GPU:0', or '' for an unknown device; "
                f"got {device!r}"
            )
    return _detect(names)


@functools.lru_cache(maxsize=64)
def _detect(devices: tuple[str, ...]) -> tuple[Topology, str]:
    topology, reason = _choose(devices)
    names = ", ".join(device or "an unknown device" for device in devices)
    log.info_once(f"topology {topology.name!r} for {names}: {reason}")
    return topology, reason


def name_of_measured(devices: Sequence[str]) -> str | None:
    """Says what some devices are, so that a measurement is known to be of the same.

    Args:
      devices: as for `detect`.

    Returns:
      The kind, number and model of the devices; of GPUs also how they are joined, as a number. None
      if they are not devices of one kind, each for itself, on one host.
    """
    hosts, kinds, indices = map(list, zip(*map(_parse, devices)))
    if _only_cpus_here():
        kinds = ["CPU" if kind == "" else kind for kind in kinds]
    if len(set(hosts) - {""}) > 1 or len(set(kinds)) > 1:
        return None
    count = len(devices)
    if kinds[0] == "CPU":
        return f"{MEASURED}{count} CPU devices of {processor_name()} with {num_cores()} cores"
    if kinds[0] != "GPU" or len(set(indices)) < count:
        return None
    return f"{MEASURED}{count} GPUs, {_gpu_models()}, joined as {detect(devices).fingerprint[:8]}"


def gpus_of_nvidia_smi() -> tuple[str, ...]:
    """Lists the GPUs that the driver shows, also those that TensorFlow cannot use.

    Returns:
      The model of each GPU; none if nvidia-smi does not run.
    """
    try:
        names = _run_nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
    except _NvidiaSmiError:
        return ()
    return tuple(name.strip() for name in names)


def _gpu_models() -> str:
    return " and ".join(dict.fromkeys(gpus_of_nvidia_smi())) or "of unknown models"


def _choose(devices: Sequence[str]) -> tuple[Topology, str]:
    """Returns the topology of some devices, and the reason for this one."""
    hosts, kinds, indices = map(list, zip(*map(_parse, devices)))
    several_hosts = len(set(hosts) - {""}) > 1
    if _only_cpus_here():
        kinds = ["CPU" if kind == "" else kind for kind in kinds]
    if set(kinds) == {"CPU"} and not several_hosts:
        return preset("shared_memory", len(devices)), "CPU devices of one host"
    if set(kinds) != {"GPU"} or several_hosts:
        reason = "these are not the CPUs of one host, nor its GPUs; pass topology= to say more"
        return preset("fully_connected", len(devices)), reason
    visible_gpus = _visible_gpus(indices)
    try:
        machine, numbers = _read_nvidia_smi()
        missing = sorted(set(visible_gpus) - set(range(len(numbers))))
        if missing:
            raise _NvidiaSmiError(f"nvidia-smi and CUDA_VISIBLE_DEVICES show no GPU for {missing}")
        return _on_gpus(machine, [numbers[gpu] for gpu in visible_gpus]), "as nvidia-smi reports"
    except _NvidiaSmiError as error:
        gpus = sorted(set(visible_gpus))
        machine = preset("fully_connected", len(gpus))
        return (
            _on_gpus(machine, [gpus.index(gpu) for gpu in visible_gpus]),
            f"{error}; pass topology= to say what joins them",
        )


def _parse(device: str) -> tuple[str, str, int]:
    """Splits a device name into host, type and index; the host may be "", an unknown type is ""."""
    host, _, name = device.rpartition("/")
    found = re.fullmatch(r"(?:device:)?(\w+):(\d+)", name, re.IGNORECASE)
    return (host, found[1].upper(), int(found[2])) if found else (host, "", 0)


def _only_cpus_here() -> bool:
    """Returns whether TensorFlow sees nothing but CPUs, so that an unknown device is a CPU."""
    if sys.modules.get("tensorflow") is None:
        return False
    import tensorflow as tf

    return {device.device_type for device in tf.config.get_visible_devices()} == {"CPU"}


def _visible_gpus(logical_gpus: Sequence[int]) -> list[int]:
    """Returns the physical GPU of each logical GPU, numbered as CUDA shows them to this process."""
    if sys.modules.get("tensorflow") is None:
        return list(logical_gpus)
    # It is there, so it may have cut GPUs into several logical ones or hidden some.
    import tensorflow as tf

    physical = [
        int(gpu.name.rpartition(":")[2])
        for gpu in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]
    ]
    return [physical[gpu] if gpu < len(physical) else gpu for gpu in logical_gpus]


def _read_nvidia_smi() -> tuple[Topology, list[int]]:
    """Returns the machine, and the number in it of each GPU that CUDA shows to this process.

    GPUs are taken to be in the same order for CUDA as for nvidia-smi, as GPUs of one model are.
    """
    try:
        machine = Topology.from_nvidia_smi(_run_nvidia_smi("topo", "-m"))
    except ValueError as error:
        raise _NvidiaSmiError(
            f"the table of `nvidia-smi topo -m` cannot be read: {error}"
        ) from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return machine, list(range(machine.num_devices))
    entries = visible.replace(" ", "").split(",")
    by_uuid = _number_by_uuid() if any(entry.startswith("GPU-") for entry in entries) else {}
    numbers = []
    for entry in entries:
        found = [by_uuid[uuid] for uuid in by_uuid if entry and uuid.startswith(entry)]
        if re.fullmatch(r"\d+", entry):
            found = [int(entry)]
        # As for CUDA, the first entry that is not a GPU hides all after it.
        if len(found) != 1 or found[0] >= machine.num_devices:
            break
        numbers += found
    return machine, numbers


def _number_by_uuid() -> Mapping[str, int]:
    """Asks nvidia-smi for the number of each GPU by its UUID."""
    numbers = {}
    for row in _run_nvidia_smi("--query-gpu=uuid,index", "--format=csv,noheader").splitlines():
        found = re.fullmatch(r"(\S+),\s*(\d+)", row.strip())
        if not found:
            raise _NvidiaSmiError(f"`nvidia-smi --query-gpu=uuid,index` printed {row!r}")
        numbers[found[1]] = int(found[2])
    return numbers


@functools.lru_cache(maxsize=4)
def _run_nvidia_smi(*arguments: str) -> str:
    """Returns what nvidia-smi prints."""
    command = " ".join(("nvidia-smi", *arguments))
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=True,
        ).stdout
    except FileNotFoundError:
        raise _NvidiaSmiError("there is no nvidia-smi on the PATH") from None
    except subprocess.TimeoutExpired:
        raise _NvidiaSmiError(f"`{command}` did not answer within {_TIMEOUT_SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
        output = " ".join(error.stdout.split())[:200]
        raise _NvidiaSmiError(
            f"`{command}` failed with status {error.returncode}: {output}"
        ) from None
    except OSError as error:
        raise _NvidiaSmiError(f"`{command}` cannot be run: {error}") from None


def _on_gpus(machine: Topology, gpus: Sequence[int]) -> Topology:
    """Returns the topology of logical devices on some GPUs of a machine, perhaps several on one."""
    if len(set(gpus)) == len(gpus):
        return machine.subset(gpus)
    # A copy within a GPU reads and writes its memory.
    routes = [
        Route(source, target, [Resource(f"memory of GPU {gpus[source]}", GPU_MEMORY / 2)])
        if gpus[source] == gpus[target]
        else machine.route(gpus[source], gpus[target])._replace(source=source, target=target)
        for source, target in ordered_pairs(len(gpus))
    ]
    name = f"{machine.name}, {len(set(gpus))} GPUs"
    return Topology.from_routes(name, len(gpus), routes, memory_bandwidth=machine.memory_bandwidth)
