"""`paceline why` says what requests wait for."""

from __future__ import annotations

import json

from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.unit.client.command_line import assert_one_line_error, invoked
from tests.unit.client.conftest import Served


async def test_why_says_what_a_request_waits_for(served: Served) -> None:
    for question in (["known"], ["--slow"]):
        shown = (await invoked("why", *question, "-a", served.address)).stdout
        assert shown == "known job=7\n  It waits because [pages] are few.\n"
    told = json.loads((await invoked("why", "known", "--json", "-a", served.address)).stdout)
    assert (told["phase"], told["reason"], told["queue_waits"]) == ("queued", "pages", {"pages": 7})
    unknown = await invoked("why", "other", "-a", served.address)
    assert unknown.exit_code == 1
    assert "other is not known" in unknown.stderr
    assert (await invoked("why", "id", "--slow", "-a", served.address)).exit_code == 2
    slow, without_id = [await invoked("why", *words, "-a", served.address) for words in (["--slow"], [])]
    assert without_id.stdout == slow.stdout


async def test_why_takes_a_part_of_an_id_that_belongs_to_one_request(served: Served) -> None:
    for part in ("0" + "1" * 8, "…0" + "1" * 8):
        shown = await invoked("why", part, "-a", served.address)
        assert shown.stdout.startswith("aa011111111 job=7\n"), shown.output
    several = await invoked("why", "0" * 8, "-a", served.address)
    assert_one_line_error(several, 1)
    assert "is a part of several ids: aa00000000, bb00000000" in several.stderr


async def test_requests_that_wait_alike_are_summed_up_and_few_of_them_shown(served: Served) -> None:
    def waits(name: str, identity: str, reason: pb.WaitReason.ValueType, position: int) -> pb.RequestWait:
        return pb.RequestWait(
            request_id=name,
            identity=identity,
            phase_us=9_000_000,
            reason=reason,
            position=position,
            first_reason=pb.WAIT_REASON_SEATS,
            explanation="It waits.",
        )

    async def shown(*options: str) -> list[str]:
        result = await invoked("why", "--slow", "--all", *options, "-a", served.address)
        assert result.exit_code == 0, result.output
        return list(result.stdout.splitlines())

    own, of_nightly = pb.WAIT_REASON_OWN_EARLIER, [f"n{number}" for number in range(1, 51)]
    response = served.fake.waits
    response.requests.append(waits("n0", "nightly", pb.WAIT_REASON_SEATS, 1))
    response.requests.extend(waits(name, "nightly", own, at + 2) for at, name in enumerate(of_nightly))
    response.requests.append(waits("a", "alice", pb.WAIT_REASON_PAGES, 1))
    lines = await shown()
    assert lines[0] == "51 of nightly wait, for up to 9.0 s: 50 for own_earlier, 1 for seats (n0)."
    assert lines[1] == "1 of alice waits, for up to 9.0 s: 1 for pages (a)."
    assert [one.split()[0] for one in lines[2:-1:2]] == ["n0", "n1", "n2", "a"]
    assert lines[-1] == "48 like these are not shown: --full shows them."
    assert len(await shown("--full")) == 2 * 52
    assert len(await shown("--json")) == 52
    del response.requests[0], response.requests[-1]
    assert (await shown())[0].endswith(": 50 for own_earlier, the first in its queue for seats.")
    del response.requests[:]
    [none] = await shown()
    assert none.startswith("3 requests wait, none much longer than predicted. `paceline timeline`")
    assert await shown("--json") == []


async def test_a_label_is_text_on_its_own_line(served: Served) -> None:
    labels = {"note": "x\nroot\n  Ended.", "title": "\x1b]0;mine\x07[red]"}
    served.fake.waits.requests.append(pb.RequestWait(request_id="a", labels=labels, explanation="It waits."))
    lines = (await invoked("why", "--slow", "--all", "-a", served.address)).stdout.splitlines()
    assert lines == [r"a note=x\nroot\n  Ended. title=\x1b]0;mine[red]", "  It waits."]
