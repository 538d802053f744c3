"""What a client of the frozen v1 sent, and what it got: bytes, and how to send them again."""
