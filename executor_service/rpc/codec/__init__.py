"""Protobuf to plans, results to protobuf, and every limit that a message alone can exceed.

A wrong shape (arrays whose lengths disagree, sums that do not match, a row that the RPC does not take) or a
wrong size refuses the whole request: `RequestRefused`. A wrong value refuses its row or op, which becomes a
`Refusal` in its place. Either way nothing has been allocated.
"""
