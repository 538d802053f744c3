"""Protobuf of the public API: requests are checked and decoded, responses encoded."""
