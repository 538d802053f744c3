"""The streams of live requests: their output on its way to the clients."""
