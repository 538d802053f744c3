"""Protobuf messages of the executor protocol, from and to plain types: the only place that knows them."""
