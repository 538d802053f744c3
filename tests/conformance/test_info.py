"""GetInfo, GetTokenizer: what the executor says of itself is complete and fits together."""

import json

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit import noise
from tests.conformance.kit.client import Executor
from tests.conformance.kit.expect import refused


def test_the_model_is_described(executor: Executor) -> None:
    model = executor.info.model
    assert model.name
    assert model.architecture
    assert model.dtype
    assert model.device
    assert model.vocab_size >= 2
    assert model.context_length >= 1
    assert model.layers >= 1 or model.parameters == 0
    assert all(token < model.vocab_size for token in model.eos_token_ids)


def test_the_limits_leave_room_to_work(executor: Executor) -> None:
    limits = executor.limits
    assert limits.page_size >= 1
    assert limits.total_pages >= 1
    assert limits.max_sequences >= 1
    assert limits.max_rows >= 1
    assert limits.max_step_tokens >= limits.max_rows, "a step of plain decodes must fit"
    assert limits.max_in_flight >= 1


@pytest.mark.parametrize(
    ("capability", "limit"),
    [
        ("VERIFY", "max_drafts"),
        ("MULTI_STEP", "max_steps"),
        ("TOP_K", "max_logprobs"),
        ("FULL_LOGITS", "max_full_logits_bytes"),
        ("ADAPTERS", "max_adapter_slots"),
    ],
)
def test_an_advertised_capability_has_a_limit_that_allows_it(
    executor: Executor, capability: str, limit: str
) -> None:
    if executor.can(capability):
        assert getattr(executor.limits, limit) >= 1


def test_capabilities_are_known_and_named_once(executor: Executor) -> None:
    capabilities = list(executor.info.capabilities)
    assert len(set(capabilities)) == len(capabilities)
    assert pb.CAPABILITY_UNSPECIFIED not in capabilities
    assert set(capabilities) <= set(pb.Capability.values())


def test_fingerprints_are_sha256_and_stable(executor: Executor) -> None:
    fingerprints = executor.info.fingerprints
    assert len(fingerprints.model) == 32
    assert len(fingerprints.vocabulary) in ((32,) if executor.can("TOKENIZER") else (0, 32))
    assert executor.call("GetInfo", pb.GetInfoRequest()) == executor.info


def test_the_sampler_is_the_one_of_the_contract(executor: Executor) -> None:
    assert executor.info.fingerprints.sampler == noise.VERSION


def test_the_epoch_is_not_zero_and_is_in_every_reply(executor: Executor) -> None:
    session = executor.open_session()
    assert executor.info.epoch != 0
    assert session.opened.epoch == executor.info.epoch
    assert session.step().raw.epoch == executor.info.epoch
    assert executor.status().epoch == executor.info.epoch
    session.close()


def test_the_tokenizer_is_there_exactly_when_advertised(executor: Executor) -> None:
    if not executor.can("TOKENIZER"):
        assert refused(executor.tokenizer) is grpc.StatusCode.NOT_FOUND
        return
    first, *others = executor.tokenizer()
    assert all(len(piece.tokenizer_json) <= 1 << 20 for piece in (first, *others))
    assert not any(piece.eos_token_ids or piece.chat_template for piece in others)
    joined = b"".join(piece.tokenizer_json for piece in (first, *others))
    assert isinstance(json.loads(joined), dict)
    assert list(first.eos_token_ids) == list(executor.info.model.eos_token_ids)


def test_the_limits_let_every_row_decode_in_one_step(executor: Executor) -> None:
    assert executor.limits.max_step_tokens >= executor.limits.max_rows


def test_every_limit_is_told(executor: Executor) -> None:
    may_be_zero = {"max_default_pages", "max_default_sequences", "max_drafts", "max_steps"}
    if not executor.can("GRAMMAR"):
        may_be_zero |= {"max_grammar_bytes", "max_grammar_compile_fuel", "max_grammar_step_fuel"}
    if not executor.can("ADAPTERS"):
        may_be_zero |= {"max_adapters", "max_adapter_slots", "max_adapter_rank", "max_adapter_bytes"}
    for field in pb.Limits.DESCRIPTOR.fields:
        assert getattr(executor.limits, field.name) > 0 or field.name in may_be_zero, field.name
    assert executor.limits.min_lease_ms <= executor.limits.max_lease_ms
    assert executor.info.contract_revision >= 1
