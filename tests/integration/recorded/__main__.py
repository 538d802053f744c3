"""Writes v1.json, once, when v1 is frozen: `python -m tests.integration.recorded`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.protobuf.message import Message
from paceline.executor.v1 import executor_pb2 as ex
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.integration.recorded.wire import EXECUTOR, FILE, send
from tests.support.stack import oracle_stack

EXECUTORS = "/paceline.executor.v1.ExecutorService/"
SCHEDULERS = "/paceline.scheduler.v1.SchedulerService/"
ADMINS = "/paceline.scheduler.v1.AdminService/"
SAMPLING = ex.Sampling(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.1, logit_bias={7: 1.5}, seed=11, logprobs=2, stop_token_ids=[9], min_tokens=1,
)  # fmt: skip
GREEDY = ex.Sampling(temperature=0)


def _executor() -> Iterator[tuple[str, Message]]:
    """Each method, in session 0, which all clients share."""

    def rows(*cache_ids: int, n: int, **fields: list[int]) -> ex.Rows:
        return ex.Rows(cache_ids=cache_ids, kv_lengths=[n] * len(cache_ids), **fields)  # type: ignore[arg-type]

    prompt = [5, 6, 7, 8]
    yield "GetInfo", ex.GetInfoRequest()
    yield "GetTokenizer", ex.GetTokenizerRequest()
    yield "OpenSession", ex.OpenSessionRequest(lease_ms=5000, label="recorded", owner="recorded")
    yield "CloseSession", ex.CloseSessionRequest(session_id=1)
    yield (
        "Prefill",
        ex.PrefillRequest(step=ex.Step(openings=[ex.Opening(cache_id=1, tokens=prompt, sampling=GREEDY)])),
    )
    yield (
        "BatchPrefill",
        ex.BatchPrefillRequest(
            step=ex.Step(
                openings=[
                    ex.Opening(cache_id=2, tokens=prompt, sampling=SAMPLING, salt=b"s", prompt_length=3),
                    ex.Opening(cache_id=3, packed_tokens=bytes([5, 0, 0, 0, 6, 0, 0, 0]), limit=1),
                ]
            )
        ),
    )
    yield "Decode", ex.DecodeRequest(step=ex.Step(rows=rows(1, n=4)))
    yield "Decode", ex.DecodeRequest(step=ex.Step(rows=rows(99, n=4)))
    yield "BatchDecode", ex.BatchDecodeRequest(step=ex.Step(rows=rows(1, n=5, steps=[3])))
    yield (
        "ForwardVerify",
        ex.ForwardVerifyRequest(step=ex.Step(rows=rows(1, n=8, drafts=[1, 2], draft_counts=[2]))),
    )
    top = rows(1, n=9, outputs=[ex.OUTPUT_MODE_TOP_K], top_ks=[3])
    yield "UnifiedDecode", ex.UnifiedDecodeRequest(step=ex.Step(rows=top))
    yield "GetCaches", ex.GetCachesRequest(cache_ids=[1, 2, 3])
    yield "TruncateKv", ex.TruncateKvRequest(truncate=ex.Truncate(cache_id=1, length=6))
    yield "ForkCache", ex.ForkCacheRequest(fork=ex.Fork(source_id=1, cache_id=4, length=5, sampling=SAMPLING))
    again = rows(4, n=5, tokens=[8], token_counts=[1])
    release = ex.Op(release=ex.Release(cache_ids=[2]))
    yield "StreamUnifiedDecode", ex.StreamUnifiedDecodeRequest(step=ex.Step(ops=[release], rows=again))
    yield "ReleaseCache", ex.ReleaseCacheRequest(release=ex.Release(cache_ids=[1, 3, 4]))
    outputs = [ex.FORWARD_OUTPUT_EMBEDDING, ex.FORWARD_OUTPUT_LOGITS]
    yield "Forward", ex.ForwardRequest(inputs=[ex.ForwardInput(tokens=[3])], outputs=outputs)
    yield "Warmup", ex.WarmupRequest()
    yield "GetStatus", ex.GetStatusRequest()


def _scheduler() -> Iterator[tuple[str, Message]]:
    off = pb.Speculation(mode=pb.SPECULATION_MODE_OFF)
    sampling = pb.SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=2)
    stop = pb.StopConditions(max_tokens=12, strings=["zz"], token_ids=[4], ignore_eos=True)
    request = pb.GenerateRequest(
        request_id="recorded-1", text="Once upon a time", sampling=sampling, stop=stop, n=2, speculation=off
    )
    yield "GetModelInfo", pb.GetModelInfoRequest()
    yield "GetTokenizer", pb.GetTokenizerRequest()
    yield "Tokenize", pb.TokenizeRequest(text="héllo")
    chat = pb.Messages(messages=[pb.Message(role="user", content="hello")])
    yield "Tokenize", pb.TokenizeRequest(messages=chat)
    yield "Detokenize", pb.DetokenizeRequest(token_ids=[72, 101, 33])
    yield "GenerateUnary", pb.GenerateUnaryRequest(request=request)
    short = pb.StopConditions(max_tokens=6, ignore_eos=True)
    greedy = pb.SamplingParams(temperature=0, seed=1)
    ids = pb.TokenIds(ids=[5, 6, 7])
    plain = pb.GenerateRequest(
        request_id="recorded-2", token_ids=ids, sampling=greedy, stop=short, speculation=off
    )
    yield "GenerateUnary", pb.GenerateUnaryRequest(request=plain)
    yield (
        "Generate",
        pb.GenerateRequest(
            request_id="recorded-3",
            messages=chat,
            sampling=greedy,
            stop=pb.StopConditions(max_tokens=1, ignore_eos=True),
            speculation=off,
        ),
    )
    yield "Generate", pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1))
    yield "Abort", pb.AbortRequest(request_ids=["nobody"])
    yield "GetStatus", pb.GetStatusRequest()


def _admin() -> Iterator[tuple[str, Message]]:
    yield "ListExecutors", admin_pb2.ListExecutorsRequest()
    yield "AbortRequests", admin_pb2.AbortRequestsRequest(request_ids=["nobody"])


def main() -> None:
    """Make each call, and write down what was sent and what came back."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        oracle_stack(Path(scratch), executor=EXECUTOR) as stack,
    ):
        calls = []
        for service, address, prefix, made in (
            ("executor", stack.addresses[0], EXECUTORS, _executor()),
            ("scheduler", stack.scheduler.address, SCHEDULERS, _scheduler()),
            ("scheduler", stack.scheduler.address, ADMINS, _admin()),
        ):
            with grpc.insecure_channel(address) as channel:
                for method, message in made:
                    calls.append(send(channel, service, prefix + method, message.SerializeToString()))
        drain = ex.DrainRequest(timeout_ms=100).SerializeToString()
        with grpc.insecure_channel(stack.addresses[0]) as channel:
            calls.append(send(channel, "executor", EXECUTORS + "Drain", drain))
    FILE.write_text(json.dumps([call.to_json() for call in calls], indent=1) + "\n")
    for call in calls:
        print(f"{call.code:16} {call.method}")


if __name__ == "__main__":
    main()
