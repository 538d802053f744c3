import asyncio
import contextlib
import inspect
import io
import json
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from paceline import errors, responses
from paceline.channel import PLAINTEXT
from paceline.cli import answer, serve
from paceline.cli.app import app
from paceline.cli.common import advice, console
from paceline.cli.status import table
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Completion, Delta
from rich.console import Console
from typer.testing import CliRunner

from tests.support.checkout import environment
from tests.support.serve import run
from tests.unit.client.command_line import assert_one_line_error, invoked
from tests.unit.client.conftest import Served

SERVE = ["serve", "--backend", "oracle", "--port", "0"]
OURS = ["serve", "model", "adapters"]
OF_CLIENTS = ["generate", "chat", "score", "embed", "rerank", "status", "why", "timeline", "steps"]
OF_CLIENTS += ["bench", "demo"]
COMMANDS = [*OURS, *OF_CLIENTS]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.delenv("PACELINE_ADDRESS", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    return CliRunner()


def test_help_lists_every_command(cli: CliRunner) -> None:
    result = cli.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in [*COMMANDS, "executor", "scheduler"]:
        assert command in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cli: CliRunner, command: str) -> None:
    result = cli.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_the_terminal_breaks_the_lines_of_the_help_and_examples_keep_theirs(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    output = cli.invoke(app, ["serve", "--help"]).output
    for paragraph in inspect.cleandoc(serve.serve.__doc__ or "").split("\n\n")[1:]:
        lines = paragraph.splitlines() if paragraph.startswith(" ") else [paragraph.replace("\n", " ")[:150]]
        assert all(line.strip() in output for line in lines)


@pytest.mark.parametrize("command", ["generate", "score"])
def test_a_text_without_quotes_is_told_of_them(cli: CliRunner, command: str) -> None:
    result = cli.invoke(app, [command, "what", "is", "this"])
    assert result.exit_code == 2
    assert "(is this): put the text in quotes" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["generate", "x"], ["status"], ["bench"], ["chat"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_nobody_there_says_how_to_start_it(cli: CliRunner, arguments: list[str]) -> None:
    line = assert_one_line_error(cli.invoke(app, [*arguments, "--address", "127.0.0.1:1"]))
    assert "nobody listens: 127.0.0.1:1" in line
    assert "paceline serve" in line


def test_another_program_at_the_address_and_a_host_that_is_not_are_told_from_nobody(cli: CliRunner) -> None:
    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(64)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        line = assert_one_line_error(cli.invoke(app, ["status", "--address", address]))
        listener.shutdown(socket.SHUT_RDWR)
    assert f"{address} speaks neither HTTP/2 nor TLS; another program listens there" in line
    line = assert_one_line_error(cli.invoke(app, ["status", "--address", "no.such.invalid:50051"]))
    assert "check the host's name" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "x", "--tools", __file__], "need --chat"),
        (["generate", "x", "--chat", "--tools", __file__], "--tools: "),
        (["generate", "x", "--grammar", __file__, "--regex", "a"], "one of them"),
        (["bench", "-c", "one"], "--concurrency"),
        (["bench", "-c", "0"], "--concurrency"),
        ([*SERVE, "-E", "novalue"], "expected NAME=VALUE"),
        ([*SERVE, "-D", "a=b"], "--draft-option needs"),
        ([*SERVE, "--draft-backend", "torch"], "needs --draft-model"),
        (["serve", "--backend", "oracle", "--api-key", "k"], "need --openai"),
        (["serve", "--max-running", "8"], "serve has no option --max-running. Settings of the services"),
        (["serve", "--adapter-dirs=x"], "--adapter-dirs; did you mean --adapter-dir?"),
        (["generate", "x", "--speculation", "on"], "--speculation: expected off, auto or a number"),
        (["bench", "--plot", "here"], "--plot needs --speculation"),
        (["bench", "--draft-backend", "oracle"], "need --serve"),
        (["bench", "--json", "/nowhere/b.json"], "--json: /nowhere/b.json: No such file or directory"),
        (["bench", "--speculation", "--plot", "/nowhere/b"], "--plot: /nowhere/b.png: No such file"),
        (["serve", "--backend", "oracle", "--port-file", "/nowhere/port"], "--port-file: /nowhere/port: No"),
        (["serve", "--backend", "oracle", "--port-file", "/"], "--port-file: /: Is a directory"),
        (
            ["serve", "--backend", "oracle", "--adapter-dir", "/nowhere"],
            "--adapter-dir: no directory /nowhere",
        ),
        (["serve", "--backend", "oracle", "--adapter-dir", "/", "--adapter", "a=none"], "no directory /none"),
        (["--tls-ca", "/nowhere", "status"], "/nowhere: No such file or directory"),
        (["--token", "two words", "status"], "token must be ASCII without spaces"),
    ],
)
def test_a_wrong_option_is_one_line(cli: CliRunner, arguments: list[str], said: str) -> None:
    assert said in assert_one_line_error(cli.invoke(app, arguments), 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.QueueFull("the queue is full", retry_after_s=2.0), "try again in 2 s"),
        (errors.Unavailable("loading", retry_after_s=0.5), "loading; try again in 0.5 s"),
        (errors.Unavailable("connection refused"), "paceline serve"),
        (errors.Unauthenticated("no token"), "PACELINE_TOKEN"),
        (errors.DeadlineExceeded("x"), "--timeout-s"),
        (errors.Unsupported("x"), "is it a Paceline scheduler?"),
        (errors.InvalidRequest("top_p: too large"), "top_p: too large"),
    ],
)
def test_an_error_says_what_to_do(error: errors.PacelineError, said: str) -> None:
    assert said in advice(PLAINTEXT, error, "127.0.0.1:1")


def test_a_scheduler_that_names_what_it_lacks_is_not_doubted() -> None:
    error = errors.Unsupported("messages.tools: not offered", reason="UNSUPPORTED")
    assert advice(PLAINTEXT, error, "here") == "here does not offer this: messages.tools: not offered"


async def paceline(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as users run it."""
    return await asyncio.to_thread(run, *arguments, stdin=stdin)


async def test_a_terminal_is_told_that_a_prompt_was_continued_and_not_asked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("paceline.cli.generate.stderr", Console(file=screen, force_terminal=True))
    await invoked("generate", "words", "-a", served.address)
    assert "--chat asks the model" in screen.getvalue()
    screen.truncate(0)
    await invoked("generate", "words", "-a", served.address, "--chat")
    await invoked("generate", "words", "-a", served.address, "--json")
    assert "--chat asks the model" not in screen.getvalue()


async def test_generate_streams_text(served: Served) -> None:
    result = await paceline("generate", "words", "-a", served.address, "--usage")
    assert (result.returncode, result.stdout) == (0, "a b c\n")
    assert "5 prompt tokens" in result.stderr
    assert "; request " in result.stderr  # for `paceline why`


@pytest.mark.parametrize("how", ["repeated", "commas", "environment"])
async def test_generate_takes_the_scheduler_that_is_there(
    served: Served, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = f"127.0.0.1:1,{served.address}"
    given = {"repeated": ["-a", "127.0.0.1:1", "-a", served.address], "commas": ["-a", both]}
    if how == "environment":
        monkeypatch.setenv("PACELINE_ADDRESS", both)
    for _ in range(2):
        arguments = ["generate", "words", *given.get(how, [])]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert (result.exit_code, result.stdout) == (0, "a b c\n")


async def test_generate_shows_what_of_a_request_has_no_effect(served: Served) -> None:
    result = await invoked("generate", "warned", "-a", served.address)
    assert result.stdout == "a b c\n"
    assert "paceline: warning: [one] " in result.stderr
    assert "\x1b" not in result.stderr


async def test_generate_speculates_as_told_and_says_how_that_went(served: Served) -> None:
    result = await paceline(
        "generate", "words", "-a", served.address, "--speculation", "3", "--drafter", "ngram"
    )
    sent = served.fake.requests[-1].speculation
    assert (sent.mode, sent.draft_tokens) == (pb.SPECULATION_MODE_FIXED, 3)
    assert sent.drafter == pb.DRAFTER_NGRAM
    said = "3 of 5 drafts accepted in 2 verifications (by position 100% 50% 0%)"
    assert said in result.stderr


async def test_generate_leaves_speculation_to_the_server(served: Served) -> None:
    await paceline("generate", "words", "-a", served.address)
    assert not served.fake.requests[-1].HasField("speculation")


def test_status_shows_drafts_and_who_makes_them() -> None:
    with console.capture() as shown:
        console.print(table(responses.status(DRAFTING), responses.executors(EXECUTORS)))
    lines = shown.get().splitlines()
    drafts = next(line for line in lines if "drafts" in line)
    assert "10 (60% accepted)" in drafts
    assert "4 (2.50 tokens each)" in drafts
    assert any("draft step" in line and "3.0 ms" in line for line in lines)
    assert any("there" in line and "lost (drafts) another [vocabulary]" in line for line in lines)


DRAFTING = pb.GetStatusResponse(
    state=pb.SCHEDULER_STATE_SERVING,
    drafted_tokens=10,
    accepted_tokens=6,
    verifications=4,
    draft_step_ms=3,
)
EXECUTORS = admin_pb2.ListExecutorsResponse(
    executors=[
        admin_pb2.Executor(address="here", connected=True, active=True),
        admin_pb2.Executor(address="there", draft=True, detail="another [vocabulary]"),
    ]
)


async def test_generate_reads_a_piped_prompt(served: Served) -> None:
    assert (await paceline("generate", "-a", served.address, stdin="from a pipe")).returncode == 0
    assert served.fake.requests[-1].text == "from a pipe"
    for chat, asked in (([], "hello\n"), (["--chat"], "hello")):
        await paceline("generate", "-a", served.address, *chat, stdin="hello\n")
        request = served.fake.requests[-1]
        assert (request.messages.messages[0].content if chat else request.text) == asked


async def test_generate_through_the_template_sends_messages(served: Served) -> None:
    await paceline("generate", "--chat", "--system", "brief", "hi", "-a", served.address)
    sent = served.fake.requests[-1].messages.messages
    assert [(one.role, one.content) for one in sent] == [("system", "brief"), ("user", "hi")]


async def test_an_answer_that_was_cut_is_called_so(served: Served) -> None:
    cut = await invoked("generate", "cut", "-a", served.address)
    assert "[cut at 3 tokens; -m N allows more]" in cut.stderr
    assert served.fake.requests[-1].stop.max_tokens == 512
    assert "[cut" not in (await invoked("generate", "words", "-a", served.address)).stderr


async def test_generate_as_json_is_one_event_a_line(served: Served) -> None:
    result = await paceline("generate", "words", "--json", "-a", served.address)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["sent", *["delta"] * 3, "finished"]
    assert events[0]["request_id"] == served.fake.requests[-1].request_id
    assert (events[-1]["reason"], events[-1]["usage"]["total_ms"]) == ("stop", 9)


async def test_generate_takes_a_grammar_from_its_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "grammar.lark").write_text("start: /é/\n", encoding="utf-8")
    await invoked("generate", "x", "--grammar", str(tmp_path / "grammar.lark"), "-a", served.address)
    assert served.fake.requests[-1].grammar.lark == "start: /é/\n"


@pytest.fixture
def tools_file(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text('[{"name": "now"}, {"type": "function", "function": {"name": "then"}}]')
    return str(path)


async def test_generate_offers_tools_and_prints_their_calls(served: Served, tools_file: str) -> None:
    options = ["--chat", "--tools", tools_file, "--tool-choice", "now", "-a", served.address]
    result = await invoked("generate", "x", *options)
    assert result.stdout == "a b c\nnow {}\nthen {}\n"
    sent = served.fake.requests[-1].messages
    assert ([tool.name for tool in sent.tools], sent.tool_choice.name) == (["now", "then"], "now")
    several = await invoked("generate", "x", *options, "-n", "2")
    assert several.stdout == "".join(f"── {i} ──\na b c\nnow {{}}\nthen {{}}\n" for i in range(2))


async def test_a_pipe_gets_the_answer_without_the_reasoning(served: Served) -> None:
    for several in ([], ["-n", "2"]):
        result = await invoked("generate", "--chat", "why", "-a", served.address, *several)
        assert "a b c\n" in result.stdout
        assert "Hmm" not in result.stdout + result.stderr
    as_json = await invoked("generate", "--chat", "why", "--json", "-a", served.address)
    assert json.loads(as_json.stdout.splitlines()[1])["reasoning"] == "Hmm. "
    chat = await invoked("chat", "-a", served.address, stdin="why\nwhy\n")
    assert "Hmm" not in chat.stdout + chat.stderr
    assert [one.content for one in served.fake.requests[-1].messages.messages] == ["why", "a b c", "why"]


async def test_a_chat_obeys_commands_and_takes_questions_of_several_lines(
    served: Served, tmp_path: Path
) -> None:
    typed = [
        "/system Be brief.", "/set temperature 0", "why", "/retry", '"""one', 'two"""', "/undo",
        f"/save {tmp_path / 'talk.json'}", "/nothing", "/quit", "not asked",
    ]  # fmt: skip
    chat = await invoked("chat", "-a", served.address, stdin="\n".join(typed))
    asked = [[one.content for one in request.messages.messages] for request in served.fake.requests]
    assert asked == [["Be brief.", "why"]] * 2 + [["Be brief.", "why", "a b c", "one\ntwo"]]
    assert served.fake.requests[-1].sampling.temperature == 0
    assert [one["content"] for one in json.loads((tmp_path / "talk.json").read_text())["messages"]] == [
        "Be brief.", "why", "a b c",
    ]  # fmt: skip
    assert chat.stdout == "a b c\n" * 3  # the answers alone: it may be a file
    assert "there is no /nothing" in chat.stderr
    assert chat.stderr.count("[the same answer") == 1


def test_a_terminal_shows_reasoning_dimmed_before_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(answer, "stderr", Console(file=screen, force_terminal=True, color_system="standard"))
    shown = answer.StreamedAnswer("id")
    for delta in (Delta(0, (), "", reasoning="[b]Hm"), Delta(0, (), "Yes", reasoning="m :smile:")):
        shown.add(delta)
    shown.end(Completion(0, "Yes", (), (), None))
    assert screen.getvalue() == "\x1b[2m[b]Hm\x1b[0m\x1b[2mm :smile:\x1b[0m\n\n"
    assert capsys.readouterr().out == "Yes\n"


def test_a_terminal_that_shows_nothing_for_long_is_shown_how_to_find_out_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first, said in ((None, True), (Delta(0, (), "Yes"), False)):
        screen = io.StringIO()
        monkeypatch.setattr(answer, "stderr", Console(file=screen, force_terminal=True))
        monkeypatch.setattr(answer, "_SILENT_S", 0.0 if said else 60.0)
        with answer.StreamedAnswer("some-id") as shown:
            if first is not None:
                shown.add(first)
            shown._silence.join()
        assert ("`paceline why some-id` says what it waits for" in screen.getvalue()) is said


def test_an_answer_that_an_error_breaks_off_ends_its_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, end in ((True, "\n"), (False, "")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        with contextlib.suppress(errors.StreamLost), answer.StreamedAnswer("id") as shown:
            shown.add(Delta(0, (), "It is"))
            raise errors.StreamLost("gone")
        assert capsys.readouterr().out == "It is" + end


async def test_status_shows_what_the_model_can_do(served: Served) -> None:
    shown = (await invoked("status", "-a", served.address)).stdout.splitlines()
    assert any(line.split() == ["model", "fake", "tool", "calls", "hermes"] for line in shown)
    assert any(line.split() == ["grammars", "no", "reasoning", "yes"] for line in shown)
    assert served.fake.looks == 1  # whether it has several models
    status = json.loads((await invoked("status", "--json", "-a", served.address)).stdout)
    assert served.fake.looks == 1  # no other schedulers are looked for
    assert status["model"] == {
        "name": "fake",
        "capabilities": ["chat", "reasoning"],
        "tool_format": "hermes",
    }


async def test_steps_shows_a_line_a_step_and_how_many_were_lost(served: Served) -> None:
    head, lost, first, second = (await invoked("steps", served.address)).stdout.splitlines()
    assert lost == "3 steps lost: this reader was too slow"
    assert first.split()[1:] == ["7", *("4.0", "4.0"), *("1", "0", "0"), *("9", "8", "1", "1"), "pages"]
    assert second.split()[1:] == ["8", *("3.0", "4.0"), *("0", "2", "0"), *("2", "6", "1", "1")]
    assert len(head.split()) >= len(first.split())


async def test_steps_writes_a_file_of_messages_and_one_for_a_viewer_of_traces(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "steps"
    to_file = ["steps", "-a", served.address, "--seconds", "9", "-o", str(file)]
    assert "2 steps, 3 lost" in (await invoked(*to_file)).stdout
    data = file.read_bytes()
    size = data[0]  # below 128: the varint has one byte
    assert len(data) == 1 + size
    assert pb.StepLog.FromString(data[1:]).first_step == 7
    await invoked(*to_file, "--perfetto")
    bars = [one for one in json.loads(file.read_text())["traceEvents"] if one["ph"] == "X"]
    shown = [(one["ts"], one["dur"], one["args"]["blocked_by"]) for one in bars if one["name"] == "step"]
    assert shown == [(1_000_000, 4000, "pages"), (1_005_000, 3000, "")]
    requests = [(one["name"], one["args"]["request"], one["dur"]) for one in bars if one["name"] != "step"]
    assert requests == [("waits", "mine", 0), ("runs", "mine", 4000), ("waits", "#2", 0)]
    assert_one_line_error(await invoked("steps", "--perfetto", "-a", served.address), 2)


async def test_status_is_shown_while_the_model_loads(served: Served) -> None:
    served.fake.loading = True
    status = json.loads((await invoked("status", "--json", "-a", served.address)).stdout)
    assert (status["running"], status["model"]) == (2, None)


async def test_an_error_in_midstream_keeps_what_came_and_fails(served: Served) -> None:
    result = await paceline("generate", "midway", "-a", served.address)
    assert result.returncode == 1
    assert result.stdout.startswith("once")
    assert "paceline: the service failed: the device failed" in result.stderr


async def test_chat_sends_the_whole_conversation_and_can_forget(served: Served) -> None:
    await paceline("chat", "-a", served.address, stdin="one\ntwo\n/reset\nthree\n/quit\nfour\n")
    sent = [[one.content for one in request.messages.messages] for request in served.fake.requests]
    assert sent == [["one"], ["one", "a b c", "two"], ["three"]]


async def test_chat_explains_its_commands_and_asks_the_model_about_none_of_them(served: Served) -> None:
    result = await paceline("chat", "-a", served.address, stdin="/help\n/nope\n/usr/bin is what?\n")
    assert result.stderr.count("/reset   forget the conversation") == 2
    assert "there is no /nope" in result.stderr
    sent = [request.messages.messages[-1].content for request in served.fake.requests]
    assert sent == ["/usr/bin is what?"]


async def test_status_as_json_has_every_counter(served: Served) -> None:
    status = json.loads((await paceline("status", "--json", "-a", served.address)).stdout)
    assert (status["state"], status["running"], status["executors"][0]["address"]) == ("serving", 2, "here")
    assert "2 of 4 " in (await paceline("status", "-a", served.address)).stdout, (
        "sequences, and places for them"
    )


async def test_the_token_comes_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    await paceline("generate", "words", "-a", served.address)
    assert served.fake.metadata["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["serve", "--backend", "oracle", "--port"], "--port"),
        (["serve", "--backend", "oracle", "--port", "0", "--executor-port"], "--executor-port"),
        (["serve", "--backend", "oracle", "--port", "0", "--openai"], "--openai"),
        (["gateway", "127.0.0.1:1", "--listen"], "--listen"),
    ],
)
def test_a_port_that_is_taken_is_reported_before_anything_starts(
    cli: CliRunner, command: list[str], option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli.invoke(app, [*command, str(port)])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert f"port {port} of 127.0.0.1 is taken by " in said
    assert f": choose one with {option}, or 0" in said


def python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def test_without_its_packages_the_command_says_what_to_install() -> None:
    program = """
        import sys
        sys.modules["typer"] = None  # as if it were not there
        from paceline.cli import main
        main()
    """
    result = python(program)
    assert result.returncode == 1
    assert result.stderr.strip().endswith('pip install -c constraints.txt ".[cli]"')


def test_the_sdk_needs_neither_the_command_line_nor_a_service() -> None:
    program = """
        import sys
        import paceline, paceline.aio
        heavy = {"typer", "rich", "torch", "numpy", "pydantic", "executor_service", "scheduler_service"}
        print(*sorted(heavy & set(sys.modules)), end="")
    """
    result = python(program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
