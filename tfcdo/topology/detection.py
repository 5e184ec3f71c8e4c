"""Topologies for users: known machines, machines of their own, and finding out about this one."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfcdo import checks
from tfcdo import log
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology
from tfcdo.topology.topology import TopologyBuilder
from tfcdo.topology.topology import ordered_pairs

__all__ = ["PRESETS", "Topology", "detect", "preset"]

# A copy within a card reads and writes its memory: half of a V100's 900 GB/s.
_ONE_CARD = 450e9
_TIME_OUT = 10.0


class _NotToldError(Exception):
    """nvidia-smi does not tell what joins the GPUs; the message says why not."""


def detect(devices: Sequence[str]) -> Topology:
    """The topology of some devices of this machine.

    GPUs are joined as `nvidia-smi topo -m` says, or, if it does not answer, all to all; logical
    GPUs of one card share its memory. CPU devices are `shared_memory`, as are unknown ones if
    TensorFlow sees nothing but CPUs. Devices of several types or hosts, and other unknown ones, are
    taken as joined all to all. What was found, and how, is logged (level INFO) the first time that
    these devices are asked for; later calls return the same.

    Args:
      devices: TensorFlow device names; "" for an unknown device.

    Returns:
      A topology over `len(devices)` devices, in their order.

    Raises:
      ValueError: if there are no devices, or `devices` holds something that is no string.

    References:
      The legend that `nvidia-smi topo -m` prints below its table.

    Example:
      >>> detect(["/device:CPU:0", "/device:CPU:1"]).name
      'shared_memory'
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
def _detect(devices: tuple[str, ...]) -> Topology:
    topology, reason = _choose(devices)
    names = ", ".join(device or "an unknown device" for device in devices)
    log.info_once(f"topology {topology.name!r} for {names}: {reason}")
    return topology


def _choose(devices: Sequence[str]) -> tuple[Topology, str]:
    """The topology of some devices, and why this one."""
    hosts, kinds, indices = map(list, zip(*map(_parse, devices)))
    several_hosts = len(set(hosts) - {""}) > 1
    if _only_cpus_here():
        kinds = ["CPU" if kind == "" else kind for kind in kinds]
    if set(kinds) == {"CPU"} and not several_hosts:
        return preset("shared_memory", len(devices)), "CPU devices of one host"
    if set(kinds) != {"GPU"} or several_hosts:
        reason = "these are not the CPUs of one host, nor its GPUs; pass topology= to say more"
        return preset("fully_connected", len(devices)), reason
    positions = _positions(indices)
    try:
        machine, numbers = _nvidia_smi()
        missing = sorted(set(positions) - set(range(len(numbers))))
        if missing:
            raise _NotToldError(f"nvidia-smi and CUDA_VISIBLE_DEVICES show no card for {missing}")
        return _on_cards(machine, [numbers[one] for one in positions]), "as nvidia-smi says"
    except _NotToldError as error:
        cards = sorted(set(positions))
        machine = preset("fully_connected", len(cards))
        return (
            _on_cards(machine, [cards.index(one) for one in positions]),
            f"{error}; pass topology= to say what joins them",
        )


def _parse(device: str) -> tuple[str, str, int]:
    """Host, type and index of a device name; the host may be left out, the type unknown ("")."""
    host, _, name = device.rpartition("/")
    found = re.fullmatch(r"(?:device:)?(\w+):(\d+)", name, re.IGNORECASE)
    return (host, found[1].upper(), int(found[2])) if found else (host, "", 0)


def _only_cpus_here() -> bool:
    """Whether TensorFlow sees no other devices than CPUs, so that an unknown one is a CPU."""
    if sys.modules.get("tensorflow") is None:
        return False
    import tensorflow as tf

    return {device.device_type for device in tf.config.get_visible_devices()} == {"CPU"}


def _positions(gpus: Sequence[int]) -> list[int]:
    """The card of each logical GPU, by its position among those that CUDA shows to this process."""
    if sys.modules.get("tensorflow") is None:
        return list(gpus)
    # It is there, so it may have cut cards into several logical GPUs or hidden some.
    import tensorflow as tf

    positions = [
        int(card.name.rpartition(":")[2])
        for card in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(card) or [None]
    ]
    return [positions[gpu] if gpu < len(positions) else gpu for gpu in gpus]


def _nvidia_smi() -> tuple[Topology, list[int]]:
    """The machine, and the number that each card that CUDA shows has in it.

    Cards are taken to be in the same order for CUDA as for nvidia-smi, as cards of one model are.
    """
    try:
        machine = Topology.from_nvidia_smi(_output("topo", "-m"))
    except ValueError as error:
        raise _NotToldError(f"the table of `nvidia-smi topo -m` cannot be read: {error}") from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return machine, list(range(machine.num_devices))
    entries = visible.replace(" ", "").split(",")
    known = _uuids() if any(entry.startswith("GPU-") for entry in entries) else {}
    numbers = []
    for entry in entries:
        found = [known[uuid] for uuid in known if entry and uuid.startswith(entry)]
        if re.fullmatch(r"\d+", entry):
            found = [int(entry)]
        # As for CUDA, the first entry that is no card hides all after it.
        if len(found) != 1 or found[0] >= machine.num_devices:
            break
        numbers += found
    return machine, numbers


def _uuids() -> Mapping[str, int]:
    """The number of each card by its UUID."""
    known = {}
    for row in _output("--query-gpu=uuid,index", "--format=csv,noheader").splitlines():
        found = re.fullmatch(r"(\S+),\s*(\d+)", row.strip())
        if not found:
            raise _NotToldError(f"`nvidia-smi --query-gpu=uuid,index` printed {row!r}")
        known[found[1]] = int(found[2])
    return known


@functools.lru_cache(maxsize=4)
def _output(*arguments: str) -> str:
    """What nvidia-smi prints."""
    command = " ".join(("nvidia-smi", *arguments))
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_TIME_OUT,
            check=True,
        ).stdout
    except FileNotFoundError:
        raise _NotToldError("there is no nvidia-smi on the PATH") from None
    except subprocess.TimeoutExpired:
        raise _NotToldError(f"`{command}` did not answer within {_TIME_OUT:g} s") from None
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stdout.split())[:200]
        raise _NotToldError(f"`{command}` failed with status {error.returncode}: {said}") from None
    except OSError as error:
        raise _NotToldError(f"`{command}` cannot be run: {error}") from None


def _on_cards(machine: Topology, cards: Sequence[int]) -> Topology:
    """The topology of devices that are on some cards of a machine, perhaps several on one."""
    if len(set(cards)) == len(cards):
        return machine.subset(cards)
    builder = TopologyBuilder()
    for source, target in ordered_pairs(len(cards)):
        one, other = cards[source], cards[target]
        if one == other:
            builder.link(source, target, [(f"card {one}", _ONE_CARD)])
        else:
            link = machine.link_by_pair[one, other]
            way = [machine.resources[index] for index in link.resources]
            builder.link(
                source,
                target,
                [(part.name, part.bandwidth) for part in way],
                via_host=link.via_host,
            )
    return builder.build(f"{machine.name}, {len(set(cards))} cards", len(cards))
