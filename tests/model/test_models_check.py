"""`paceline models check`: what can be served is told, and what is missing, from headers alone."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paceline.cli import models_check
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from executor_service.backends.torch_backend.examine import examined
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from scheduler_service.text.worker.examine import examined as chats_of
from tests.model.tiny import save
from tests.unit.scheduler_shell.tool_styles import TOOL_STYLES

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save("qwen3", path)
    style = TOOL_STYLES["Qwen3"]
    style.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": style.template}))
    return path


def changed(tiny: Path, to: Path, **fields: Any) -> Path:
    shutil.copytree(tiny, to)
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return to


def check(path: Path) -> tuple[int, str]:
    """The status and the output of the command."""
    command = [sys.executable, "-m", "paceline", "models", "check", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=100)
    return done.returncode, done.stdout


def test_a_model_that_can_be_served_is_told_with_its_tools_and_memory(tiny: Path) -> None:
    status, text = check(tiny)
    assert status == 0
    for line in ("weights +yes: qwen3, ", "tokenizer +yes", "chats +yes; tools: hermes; reasoning: yes"):
        assert re.search(f"^{line}", text, re.MULTILINE), text
    assert "in float32" in text
    status, text = check(tiny / "nowhere")
    assert status == 1
    assert re.search("^weights +no: .*no such file or directory", text, re.MULTILINE), text


def test_what_is_missing_is_told_by_its_name(tiny: Path, tmp_path: Path) -> None:
    no_tensor = changed(tiny, tmp_path / "no_tensor")
    (file,) = no_tensor.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file)
    assert "model.layers.0.mlp.up_proj.weight" in examined(no_tensor)["problem"]
    assert "logit_scale" in examined(changed(tiny, tmp_path / "field", logit_scale=2.0))["problem"]
    assert "num_hidden_layers" in examined(changed(tiny, tmp_path / "none", num_hidden_layers="x"))["problem"]
    mute = changed(tiny, tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    assert "tokenizer.json" in examined(mute)["tokenizer_problem"]
    assert not examined(mute)["problem"]


def test_a_strangers_template_is_read_under_the_limits_of_a_schedulers_tokenizer(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = changed(tiny, tmp_path / "endless")
    template = "{{ 7 ** 999999999 }}"  # computed when the template is compiled
    (endless / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    def command(module: str, *arguments: str) -> list[str]:
        limits = ["512", "1"] if "text.worker" in module else []
        return [sys.executable, "-m", module, *arguments, *limits]

    monkeypatch.setattr(models_check, "command", command)
    done = CliRunner().invoke(models_check.models, ["check", str(endless)])
    assert done.exit_code == 0, done.output  # the model can be loaded
    assert re.search(
        r"^tokenizer +no, .*limits of .*processor time ended \(SIGXCPU\)", done.output, re.MULTILINE
    )


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_the_format_of_calls_is_that_which_a_scheduler_finds(name: str) -> None:
    style = TOOL_STYLES[name]
    sent = {"tokenizer_json": style.tokenizer().to_str(), "chat_template": style.template}
    found = chats_of({**sent, "bos_token": style.bos, "eos_token": "", "add_bos": False})
    assert found["takes_tools"]
    assert found["tool_format"]
    broken = chats_of({**sent, "chat_template": "{% if", "bos_token": "", "eos_token": "", "add_bos": False})
    assert broken["template_problem"]
    assert not broken["problem"]


def test_a_model_of_any_size_is_checked_by_its_headers(tiny: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    path = changed(tiny, tmp_path / "large", **sizes, **heads, layer_types=["full_attention"] * 80)
    for file in path.glob("*.safetensors"):
        file.unlink()
    spec = spec_from_config(json.loads((path / "config.json").read_text()), {}, "config.json")
    header, at = {}, 0
    for name, shape in expected_shapes(spec):
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        stream.truncate(8 + len(head) + at)  # a hole: 140 GB that nobody reads
    found = examined(path)
    assert found["problem"] == ""
    assert found["weight_bytes"]["bfloat16"] == at > 100e9
