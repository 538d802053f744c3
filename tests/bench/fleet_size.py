"""What the directory and affinity cost by the number of stacks: one process, no network, no Ray.

    python -m tests.bench.fleet_size                # 10, 100, 256 and 1,000 stacks
    python -m tests.bench.fleet_size --stacks 4000

Printed for each number are, in time of one core: what a scheduler spends on the entries that all others
announce to it every two seconds, without gRPC; the bytes of a client's look, and what scheduler and client
spend on it; what a client spends to choose a scheduler; streams on the fullest stack by the mean, with 8
streams a stack; and the share of conversations that move when one stack is lost.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from paceline.affinity import choice, preference
from paceline.channel import Security
from paceline.directory import KnownSchedulers
from paceline.failover import Rotation
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.directory.codec import add_entry, decode_entry
from scheduler_service.directory.directory import Directory, Rank

ANNOUNCED_EVERY_S, STREAMS_OF_A_STACK, KEYS = 2.0, 8, 2000


def entry(number: int, running: int = 0) -> pb.SchedulerEntry:
    """What a stack announces of itself."""
    return pb.SchedulerEntry(
        address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:50051",
        tls_name=f"stack-{number}.fleet.example",
        model="Qwen3-8B",
        model_fingerprint=bytes(32),
        state=pb.SCHEDULER_STATE_SERVING,
        load=pb.SchedulerLoad(running=running, seats=64),
        generation=1,
        instance=f"{number:032x}",
    )


def seconds(work: Callable[[], object]) -> float:
    """CPU time of a call, least of three."""
    found = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def written(directory: Directory, announced: Sequence[bytes]) -> None:
    """Read and write what all stacks have announced once."""
    for number, data in enumerate(announced):
        listing = decode_entry(pb.AnnounceSchedulerRequest.FromString(data).entry)
        directory.write(listing, f"stack-{number}", Rank.ANNOUNCED, 0.0, math.inf)


def listed(directory: Directory) -> list[bytes]:
    """The messages of a look."""
    messages, after = [], ""
    while entries := directory.listed(after, 128):
        message = pb.WatchSchedulersResponse()
        for one in entries:
            add_entry(message, one, 0.0)
        messages.append(message.SerializeToString())
        after = entries[-1].listing.address
    return messages


def learned(messages: Sequence[bytes], given: str) -> KnownSchedulers:
    """A client after a look."""
    known = KnownSchedulers([given], Security(), "any")
    entries = [one for data in messages for one in pb.WatchSchedulersResponse.FromString(data).entries]
    own = next(one for one in entries if one.address == given)
    own.written_by = ""
    for one in entries:
        one.tls_name = ""
    known.saw(given, entries, 0.0)
    return known


def placed(addresses: Sequence[str], keys: Sequence[bytes]) -> list[str]:
    """Where a client's streams go, all of which live."""
    live = Counter(dict.fromkeys(addresses, 0))
    found = [""] * len(keys)
    for number, key in enumerate(keys):
        found[number] = choice(key, live)
        live[found[number]] += 1
    return found


def report(stacks: int) -> str:
    """The line of a number of stacks."""
    directory = Directory()
    announced = [
        pb.AnnounceSchedulerRequest(entry=entry(number, number % 9)).SerializeToString()
        for number in range(stacks)
    ]
    written(directory, announced)
    write_s = seconds(lambda: written(directory, announced))
    for one in directory:
        one.encoded = None
    messages = listed(directory)
    look_s = seconds(lambda: listed(directory))
    given = entry(0).address
    learn_s = seconds(lambda: learned(messages, given))
    known, rotation = learned(messages, given), Rotation([given])
    rotation.use(known.addresses, known.loads, known.draining, known.adapters, known.models, known.foreign)
    choose_s = seconds(lambda: [rotation.order(0.0, b"%d" % number) for number in range(20)]) / 20
    keys = [b"key %d" % number for number in range(min(STREAMS_OF_A_STACK * stacks, KEYS))]
    addresses = [entry(number).address for number in range(max(len(keys) // STREAMS_OF_A_STACK, 2))]
    streams = Counter(placed(addresses, keys))
    before = [preference(key, addresses)[0] for key in keys[:KEYS]]
    after = [preference(key, addresses[1:])[0] for key in keys[:KEYS]]
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) <= {addresses[0]}
    return (
        f"{stacks:6,} {write_s / ANNOUNCED_EVERY_S:9.1%} {sum(map(len, messages)) / 1000:8,.0f} kB"
        f" {look_s * 1000:7.1f} ms {learn_s * 1000:7.1f} ms {choose_s * 1000:7.2f} ms"
        f" {max(streams.values()) * len(addresses) / len(keys):8.2f} {len(moved) / len(keys):7.2%}"
        f" of {1 / len(addresses):.2%}"
    )


def main() -> None:
    """Print a line for each number of stacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stacks", type=int, nargs="*", default=[10, 100, 256, 1000])
    print("stacks  announced     look  listed by  learned by   choice  fullest  moved")
    for stacks in parser.parse_args().stacks:
        print(report(stacks), flush=True)


if __name__ == "__main__":
    main()
