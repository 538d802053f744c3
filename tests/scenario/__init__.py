"""One scenario that the clients of all languages run against real services.

`python -m tests.scenario LANGUAGE...` starts the services, then each language's runner, a program that
`.ci/clients` builds. A runner reads one step per line from stdin, as JSON, and writes its outcome as one
line of JSON. `scenario.json` has the steps and the outcomes that are expected; tokens can be, for the
services run the oracle, whose tokens depend on the request alone. A step that showed nothing, because the
machine was slow or frozen, is taken again: see `steps.Missed`.

A step has
    name                 what it shows
    at                   schedulers for the client, by their names in `stage.py`; runners get `addresses`
    call                 model_info, tokenize, detokenize, complete, generate, score, embed or rerank
    request              of the last five: the RPC's request as proto3's JSON
    text, token_ids      of tokenize and detokenize
    in_order             the request has an affinity key that lets its client try `at` in this order
    affinity_key         of the request
    lands                of several schedulers, that of the request's affinity takes it
    timeout_ms           the call's deadline
    token                the client's
    tls                  connections are encrypted; the authority's file, which runners get as `ca`
    parallel             so many streams of the same request at once; the first one reports
    failover_timeout_ms  the client's
    leave_after_tokens   leave the stream after so many tokens
    abort_after_tokens   call Abort with the stream's request id after so many, and read on
    report_after_tokens  write {"received": so many} as a line of its own, and read on
    kill, freeze,        then the one of these schedulers that runs the stream is killed, stopped, or
    restart              killed and started again at its address
    then                 "idle": afterwards the schedulers compute nothing
    expect               what the outcome has, at least; {"contains": text}, {"at_least": number} and
                         {"near": number} and {"sha256": of the text, or of the JSON without spaces}
                         stand for values

An outcome is {"left": true}, {"error": ...} or what the call gave:
    completions          text, token_ids, reason (stop, length), stop_string, prompt_tokens,
                         completion_tokens
    prompt_logprobs      of generate: numbers, if the request asks for them
    different            of parallel streams: how many had another outcome than the first
    scores               token_ids, logprob
    vectors              arrays of numbers
    results              index, score
    error                code, reason, message, retryable, retry_after_ms (null: no hint), lost

`directory.json` has cases for the unit tests of each client that learns of schedulers from directories
(DIRECTORY in scheduler.proto): what it is given (`given`, `tls`: an authority, `use`: off, safe or any), and
steps, whose first key says what they are:
    saw                  the scheduler there listed `entries` at `at_s`, and one on 127.0.0.1 for each port of
                         the range `ports`; what an entry does not say is as in `entry` of the Python test
    lost, has_none       a look there failed, or found that it has no directory, at `at_s`
    refused              a scheduler did not let this caller look, at `at_s`
    distrust             what is there is not what its entry says
    addresses, count     all that are used, in any order; how many
    draining, foreign,   what is known of those that are used
    loads, adapters
    tls_name             [address, name]: the name of its certificate; null: it gets no connection
    reports, checked     whether a model's `fingerprint` is that of the entry there; whether it ever was
    asks                 those that several looks in turn go to at `at_s`, while those of `down` are down
    time_to_look_s       whether `caller`, or the usual one, looks then; if so, it does
"""
