"""`python -m executor_service.grammar.trial`: compiles grammars, so that no other process fails on them.

Reads lines of JSON: first the engine's settings, then one grammar each; answers each with why it can't be
compiled, or "". A grammar that takes more than its CPU time ends the process by SIGPROF; one that the library
can't bear may end it, too.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import STACK_BYTES, GrammarInvalid, GrammarSource


def main() -> None:
    """Serve until standard input ends."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    """Compile the grammar of each line of standard input; answer why that is not possible, or ""."""
    settings = json.loads(sys.stdin.readline())
    engine = GrammarEngine(
        settings["tokenizer_json"].encode(),
        settings["vocab_size"],
        settings["eos_token_ids"],
        settings["compile_fuel"],
        settings["step_fuel"],
    )
    for line in sys.stdin:
        grammar = json.loads(line)
        source = GrammarSource(grammar["kind"], grammar["text"], tuple(grammar["choices"]))
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # its default action is the end
        try:
            engine.compile(source)
            why = ""
        except GrammarInvalid as error:
            why = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(why), flush=True)


if __name__ == "__main__":
    main()
