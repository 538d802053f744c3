"""The pure core: events in, plans out. No I/O, no clock, no randomness, no protobuf.

`StepScheduler` (scheduler.py) is the whole surface; the types that cross it are in `request.py` (in),
`step.py` (to and from an executor) and `events.py` (out).
"""
