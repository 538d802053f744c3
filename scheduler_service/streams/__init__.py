"""The answers of live requests, each on its way to its client."""
