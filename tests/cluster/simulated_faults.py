"""The faults of a schedule in `simulator`: which there are, when they come, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_hosts import ALL, HEARTBEAT_SECONDS, Process

if TYPE_CHECKING:
    from simulator import World

FAULTS = (
    "kill",
    "kill",
    "kill both",
    "stop",
    "notice",
    "notice",
    "cut",
    "one way",
    "damage",
    "replace",
    "full",
    "end",
)
# What may be wrong with one host from the start.
BUGS = ("setting", "program", "ends", "stuck", "deaf", "busy", "busy")


def draw_faults(draw: Callable[[], float]) -> list[tuple[int, str]]:
    """Draws up to three faults, each after some number of events."""
    count = int(draw() * 3.99)
    # Most in a first run, some while the job recovers.
    moments = sorted(int(draw() * (60 if draw() < 0.3 else 300)) for _ in range(count))
    return [(moment, FAULTS[int(draw() * len(FAULTS))]) for moment in moments]


def inject(world: World, kind: str) -> None:
    """Makes a fault."""
    draw = world.draw
    alive = [p for (_, job), p in world.workers.items() if job == world.job and not p.is_dead]
    if not alive:
        return
    process = alive[int(draw() * len(alive))]
    if not (kind == "damage" or (kind == "notice" and process.is_fitting)):
        everyone = kind in ("kill both", "replace", "end")
        for touched in alive if everyone else [process]:
            touched.is_touched = True
    world.log.append(f"{world.now:.2f} {kind} host {process.host} ({process.phase})")
    if kind in ("kill", "kill both"):
        killed = alive[:2] if kind == "kill both" else [process]
        for victim in killed:
            victim.is_victim = True
            world.end(victim, 137)
    elif kind == "stop":
        world.stop_process(process)
        world.after(world.delay(40.0), world.resume_process, process)
    elif kind == "notice":
        process.take_signal(15)
    elif kind == "cut":
        for connection in process.connections:
            world.cut(connection)
    elif kind == "one way":
        _cut_one_way(world, process)
    elif kind == "damage" and world.disk.files:
        name = max(world.disk.files)
        run, state, _ = world.disk.files[name]
        world.disk.files[name] = run, state, False
    elif kind == "full":
        process.is_full = True
    elif kind == "end":
        for launcher in world.launchers:
            launcher.inbox.append(("ask", 15))
            world.fire(launcher.signal)
    elif kind == "replace":
        # The machines cannot be reached any more, and the job is started elsewhere.
        for launcher in world.launchers:
            launcher.is_dead = True
        for old in alive:
            for connection in old.connections:
                world.cut(connection)
            if old.cluster is not None:
                news = draw() * HEARTBEAT_SECONDS
                world.after(news, world.break_up, old.cluster)
        world.start_job()


def _cut_one_way(world: World, process: Process) -> None:
    """Lets nothing out of a host, or nothing in, until the network is mended.

    TensorFlow notices after its time without heartbeats: the chief if none come in, and a host if
    its own are not answered.
    """
    host = process.host
    is_out = world.draw() < 0.5
    way = (host, ALL) if is_out else (ALL, host)
    world.ways[way] = world.now + world.delay(40.0)
    everyone = [p for (_, job), p in world.workers.items() if job == world.job and not p.is_dead]
    unanswered = [p for p in everyone if p.host] if is_out and not host else [process]

    def notice() -> None:
        if world.blocked(*way) <= 0.0:
            return
        if is_out != (host == 0):  # The chief gets no heartbeats.
            for cluster in {id(p.cluster): p.cluster for p in everyone}.values():
                if cluster is not None:
                    world.break_up(cluster)
            return
        for other in unanswered:
            other.is_cut_off = other.cluster is not None

    world.after(HEARTBEAT_SECONDS, notice)
